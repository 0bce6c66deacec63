"""Writes files and folders atomically.

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
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

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
        temporary = _temporary_name(path)
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


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user names.

    A regular or new file, also behind links, is replaced atomically and keeps its permissions. A pipe, a
    character device, or a descriptor of this process (/dev/stdout, /dev/fd/3) is written to.

    Raises:
        UserError: it is a folder, a socket or a disk.
    """
    with doing("written", path):
        opened = _opened_stream(path)
        if opened is not None:
            sys.stdout.flush()
            with opened:
                opened.write(content)
            return
        file = Path(os.path.realpath(path))
        mode = stat.S_IMODE(file.stat().st_mode) & 0o777 if file.exists() else None
        write_bytes(file, content, mode=mode)


def check_output(path: Path) -> None:
    """Check that `write_output` will find a place to write to, before the work whose result it writes.

    Raises:
        UserError or OSError: as `write_output`.
    """
    with doing("written", path):
        if not is_stream(path):
            _check_no_folder(path)
            temporary = _temporary_name(Path(os.path.realpath(path)))
            temporary.open("xb").close()
            temporary.unlink()


def is_stream(path: Path) -> bool:
    """Whether `write_output` writes into what a path names, so that a second time adds to the first."""
    named = _descriptor(path)
    if named is not None:
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _opened_stream(path: Path) -> BinaryIO | None:
    """The pipe, device or descriptor that a path names, opened; None: it names a file or nothing."""
    if (number := _descriptor(path)) is not None:
        # Opened by its name, a file would be written from its beginning.
        return os.fdopen(os.dup(number), "wb")
    if is_stream(path):
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), "wb")
    _check_no_folder(path)
    return None


def _check_no_folder(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder, a socket or a disk; accepted: a file, a pipe or a terminal")


def _descriptor(path: Path) -> int | None:
    """The descriptor of this process that a path names, if it names one."""
    for _ in range(40):  # as many links as Linux follows
        path = Path(os.path.realpath(path.parent), path.name)
        if path.parent == Path(f"/proc/{os.getpid()}/fd") and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


@contextmanager
def drawing(file: Path) -> Iterator[Path]:
    """Yields a temporary file to draw a picture into, which is written to `file` at the end.

    Raises:
        UserError: the picture is refused, or needs the extra `plot`.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder, file.name)
        except ValueError as error:
            raise UserError(str(error)) from error
        except ModuleNotFoundError as error:
            raise UserError(
                f"a picture needs {error.name}: pip install '.[plot]' in asyncpp's clone"
            ) from error
        write_output(file, Path(folder, file.name).read_bytes())


def remove_temporary(path: Path) -> None:
    """Remove the temporary files of all who are writing a file; they get FileNotFoundError."""
    for temporary in path.parent.glob(f"{_temporary_prefix(path)}*"):
        temporary.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    return path.parent / f"{_temporary_prefix(path)}{secrets.token_hex(8)}"


def _temporary_prefix(path: Path) -> str:
    # Not the whole name: with a suffix it could be too long.
    return f".{path.name[:40]}."


def temporary_folder(folder: Path) -> Path:
    """Make a hidden folder next to `folder`, to be filled and renamed to it."""
    temporary = _temporary_name(folder.absolute())
    temporary.mkdir()
    return temporary


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


def real_folder(folder: Path) -> Path:
    """A folder that may be a link, or what the link names: a rename does not follow it."""
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill, which becomes `folder` at the end.

    Raises:
        UserError: `folder` exists and is not an empty folder.
    """
    folder = real_folder(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; name a new or empty folder")
    with doing("made", folder):
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_folder(folder)
    try:
        with filling(folder):
            yield temporary
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
