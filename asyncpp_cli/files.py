"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import DamagedError, UserError, doing


def write_text(path: Path, text: str) -> None:
    """Replace the file at once: a reader sees the old text or the new, never a part."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, of a file that is no text."""
    with doing("written", path):
        # Not the whole name: with more letters, it might be longer than a name may be.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # mkstemp makes files that only their owner reads; an experiment is read by a whole group.
            Path(temporary).chmod(0o666 & ~usual_mask())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def usual_mask() -> int:
    """The permission bits that this process's user withholds from new files (the umask)."""
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """As `write_text`, of one JSON object."""
    write_text(path, json.dumps(content, allow_nan=True) + "\n")


def read_json(path: Path, *, newest_format: int) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it cannot be read, holds no JSON object, or one whose `format` is later than
            `newest_format`.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        # Also of numbers of thousands of digits, and of brackets in thousands of brackets.
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
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill: what the context gives stands beside `folder` and takes its place at the end.

    Raises:
        UserError: there is something in `folder` already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; name a new or empty folder")
    parent = folder.absolute().parent
    with doing("made", folder):
        parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name[:40]}.", dir=parent))
    try:
        making.chmod(0o777 & ~usual_mask())
        yield making
        making.replace(folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
