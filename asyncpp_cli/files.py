"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import DamagedError


def write_text(path: Path, text: str) -> None:
    """Replace the file at once: a reader sees the old text or the new, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        _give_usual_mode(temporary)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _give_usual_mode(path: str) -> None:
    # mkstemp makes files that only their owner reads; an experiment is read by a whole group.
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)  # noqa: PTH101 (a plain string is what mkstemp returns)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """As `write_text`, of one JSON object."""
    write_text(path, json.dumps(content, allow_nan=True) + "\n")


def read_json(path: Path, *, newest_format: int) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it holds no JSON object, or one whose `format` is later than `newest_format`.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path} holds no JSON object")
    if content.get("format", 0) > newest_format:
        raise DamagedError(f"{path} has format {content['format']}: a newer asyncpp wrote it")
    return content
