"""Writes files and folders atomically."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import DamagedError, UserError, doing
from stages.records import read_bytes


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new, never a part."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, for bytes."""
    with doing("written", path):
        # Not the whole name: with a suffix it could be too long.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # mkstemp makes files that only their owner can read; experiments are shared.
            Path(temporary).chmod(0o666 & ~usual_mask())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def usual_mask() -> int:
    """The process's umask."""
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """As `write_text`, for a JSON object."""
    write_text(path, json.dumps(content, allow_nan=True) + "\n")


def read_json(path: Path, *, newest_format: int) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedError: it cannot be read, is not a JSON object, or has a `format` above `newest_format`.
    """
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        # Also raised for numbers of thousands of digits and for deeply nested brackets.
        raise DamagedError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} holds no JSON object")
    written = content.get("format", 0)
    if not isinstance(written, int) or isinstance(written, bool):
        raise DamagedError(f"{path} has format {written!r}, accepted: whole numbers up to {newest_format}")
    if written > newest_format:
        raise DamagedError(f"{path} has format {written}: a newer asyncpp wrote it")
    return content


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, created if missing; no lock if the filesystem has none."""
    with file.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
        except OSError:
            # Claims need no lock, and files are written atomically: either of two writers is right.
            yield
            return
        yield


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill, which becomes `folder` at the end.

    Raises:
        UserError: `folder` exists and is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; name a new or empty folder")
    parent = folder.absolute().parent
    with doing("made", folder):
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:40]}.", dir=parent))
    try:
        temporary.chmod(0o777 & ~usual_mask())
        yield temporary
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
