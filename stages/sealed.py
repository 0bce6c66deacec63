"""JSON files that carry a checksum of what they say: one that is torn or altered reads as not there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SEAL = "sha256_of_the_rest"
TICK = 2.0
"""Seconds that a file must have stood before its time of change vouches for it: a filesystem's clock is
coarse."""


def seal_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object without its seal, however it is laid out in a file."""
    rest = {key: value for key, value in content.items() if key != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_sealed(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file at once, put onto the disk before it takes its name.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as opened:
            json.dump({**content, SEAL: seal_of(content)}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(file)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_sealed(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, it cannot be read, or its seal is broken."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get(SEAL) != seal_of(content):
        return None
    return content


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names onto the disk, where the filesystem knows how."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
