"""A rank's last word on a full disk: room for it is taken while there is some.

A file that is there can be written over where no other can be made, and it can be renamed. (Not on
filesystems that copy on write; there the rank has ended without a word.)
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
    """Take room for a file that is to be written when the disk may be full."""
    with contextlib.suppress(OSError), _reserved(file).open("wb") as opened:
        opened.write(b" " * _BYTES)
        opened.flush()
        os.fsync(opened.fileno())


def write_reserved(file: Path, content: Mapping[str, Any]) -> bool:
    """Write a JSON object into the room that was taken for its file. Whether there was any."""
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
    """Give back the room of a file that needs it no more."""
    with contextlib.suppress(OSError):
        _reserved(file).unlink(missing_ok=True)


def _reserved(file: Path) -> Path:
    return file.with_name(f"{file.name}.reserved")
