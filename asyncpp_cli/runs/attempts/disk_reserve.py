"""Disk space reserved for the files that a rank writes as it ends, so that it can write them on a full disk.

An existing file can be overwritten and renamed when no new one can be created. This does not hold on
copy-on-write filesystems; there the rank's end is not recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BYTES = 4096


def reserve(file: Path) -> None:
    """Reserve space for a file."""
    with contextlib.suppress(OSError), _reserved(file).open("wb") as opened:
        opened.write(b" " * _BYTES)
        opened.flush()
        os.fsync(opened.fileno())


def write_reserved(file: Path, content: Mapping[str, Any]) -> bool:
    """Write a JSON object into the space reserved for its file; returns whether that succeeded."""
    text = json.dumps(content).encode()
    if len(text) > _BYTES:
        return False
    try:
        with _reserved(file).open("r+b", buffering=0) as opened:
            opened.write(text.ljust(_BYTES))
        _reserved(file).rename(file)
    except OSError:
        return False
    return True


def release(file: Path) -> None:
    """Remove the reservation of a file."""
    with contextlib.suppress(OSError):
        _reserved(file).unlink(missing_ok=True)


def _reserved(file: Path) -> Path:
    return file.with_name(f"{file.name}.reserved")
