"""JSON files that carry a checksum of their content: one that is torn or altered reads as missing."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CHECKSUM_KEY = "sha256_of_the_rest"
_MARGIN = 22.0
"""Seconds: clocks of filesystems are coarse (2), and another machine's may differ from this one's (20)."""


def identifies(modified: float) -> bool:
    """Whether a file's modification time (seconds since 1970) identifies its content: no change of it from
    now on can have the same time."""
    return abs(time.time() - modified) > _MARGIN


def checksum_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object without its checksum, independent of its layout in a file."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_checksummed(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file atomically, after its content is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as opened:
            json.dump({**content, CHECKSUM_KEY: checksum_of(content)}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(file)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_checksummed(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it is missing, unreadable, or does not match its checksum."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get(CHECKSUM_KEY) != checksum_of(content):
        return None
    return content


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk, where the filesystem can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
