"""Writes files and folders atomically: into a temporary one beside it, which then gets its name.

Files and folders get the rights that any new ones get in their folder, by its setgid bit, its default ACL and
the umask; those of Python's `tempfile` belong to their owner alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import DamagedError, UserError, doing, filling
from stages.config.records import encoded, loaded, read_bytes, with_checksum


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new, never a part."""
    write_bytes(path, text.encode())


def write_bytes(
    path: Path,
    content: bytes,
    *,
    unless: Callable[[], bool] | None = None,
    sync: bool = False,
    mode: int | None = None,
) -> None:
    """Replace the content of a file by these bytes at once: readers see the old content or the new one.

    Args:
        path: the file.
        content: its new content.
        unless: asked once the temporary file is there; the file stays as it is if this holds.
        sync: whether the content is on the disk before it replaces the file.
        mode: its permissions; None: those of a new file.
    """
    with doing("written", path):
        temporary = temporary_name(path)
        try:
            with temporary.open("xb") as file:
                if mode is not None:
                    with suppress(OSError):  # a filesystem that keeps none
                        os.fchmod(file.fileno(), mode)
                file.write(content)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            if unless is not None and unless():
                temporary.unlink(missing_ok=True)
            else:
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, content: Mapping[str, Any], *, unless: Callable[[], bool] | None = None) -> None:
    """Replace a file at once by a JSON object with a checksum (`stages.config.records`)."""
    write_bytes(path, with_checksum(json.dumps(content)), unless=unless)


def write_record(path: Path, record: object) -> None:
    """Replace a file at once by a record (`stages.config.records`)."""
    write_bytes(path, encoded(record))


def read_json(path: Path, *, newest_format: int) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedError: it cannot be read, is not a JSON object, does not match its checksum, or has a `format`
            above `newest_format`.
    """
    content = loaded(read_bytes(path), where=str(path), newest_format=newest_format)
    if not isinstance(content, dict):
        raise DamagedError(f"{path} holds no JSON object")
    return dict(content)


def append_line(file: Path, text: str) -> None:
    """Append a line to a file, which is made if it is missing; a torn last line stays apart.

    Raises:
        OSError: it could not be written, or only in part.
    """
    with doing("written", file), file.open("a+b", buffering=0) as opened:
        line = f"{text}\n".encode()
        size = opened.seek(0, os.SEEK_END)
        if size and os.pread(opened.fileno(), 1, size - 1) != b"\n":
            line = b"\n" + line
        if opened.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill, which becomes `folder` at the end.

    Raises:
        UserError: `folder` exists and is not an empty folder.
    """
    folder = real_folder(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; name a new or empty folder")
    with folder_at_once(folder) as temporary, filling(folder):
        yield temporary


@contextmanager
def folder_at_once(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder next to `folder` to fill, which is renamed to it at the end, or removed."""
    with doing("made", folder):
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(folder.absolute())
        temporary.mkdir()
    try:
        yield temporary
        # rename(2) replaces an empty folder at most.
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def real_folder(folder: Path) -> Path:
    """A folder that may be a link, or what the link names: a rename does not follow it."""
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def remove_temporary(path: Path) -> None:
    """Remove the temporary files of all who are writing a file; they get FileNotFoundError."""
    for temporary in path.parent.glob(f"{_temporary_prefix(path)}*"):
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, created if missing; no lock if the filesystem has none."""
    with file.open("a") as opened:
        # Claims need no lock, and files are written atomically: either of two writers is right.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def temporary_name(path: Path) -> Path:
    """A new hidden name beside a path."""
    return path.parent / f"{_temporary_prefix(path)}{secrets.token_hex(8)}"


def _temporary_prefix(path: Path) -> str:
    # Not the whole name: with a suffix it could be too long.
    return f".{path.name[:40]}."
