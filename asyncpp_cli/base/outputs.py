"""Writes the files that a user names on the command line: regular ones, pipes, devices and pictures."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from asyncpp_cli.base.atomic_files import temporary_name, write_bytes
from asyncpp_cli.base.errors import UserError, doing


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
        UserError: it is a folder, a socket or a disk.
        OSError: no file can be made in its folder.
    """
    with doing("written", path):
        if not is_stream(path):
            _check_no_folder(path)
            temporary = temporary_name(Path(os.path.realpath(path)))
            temporary.open("xb").close()
            temporary.unlink()


@contextmanager
def drawing(file: Path) -> Iterator[Path]:
    """Yields a temporary file to draw a picture into, which is written to `file` at the end.

    Raises:
        UserError: as `refusing_pictures`.
    """
    with tempfile.TemporaryDirectory() as folder:
        with refusing_pictures():
            yield Path(folder, file.name)
        write_output(file, Path(folder, file.name).read_bytes())


@contextmanager
def refusing_pictures() -> Iterator[None]:
    """Within it a picture may be refused.

    Raises:
        UserError: it is, or needs the extra `plot`.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
    except ModuleNotFoundError as error:
        raise UserError(f"a picture needs {error.name}: pip install '.[plot]' in asyncpp's clone") from error


def is_stream(path: Path) -> bool:
    """Whether `write_output` writes into what a path names, so that a second time adds to the first."""
    if _descriptor(path) is not None:
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
