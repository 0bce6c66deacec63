"""Files of the repository and of experiments: paths, contents, and edits that fit their checksums."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from asyncpp_cli.base.atomic_files import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
"""The repository's folder."""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, but for locks."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "lock"
    }


def edit(file: Path, **changes: Any) -> None:
    """Replace values of a JSON file; its checksum fits afterwards."""
    write_json(file, read_json(file, newest_format=99) | changes)


def write_program(file: Path, *lines: str) -> None:
    """Write a script of the shell that can be run."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)


NULL, FULL = 3, 7
"""Minor numbers of /dev/null and /dev/full."""


def own_device(path: Path, minor: int) -> Path:
    """A device like /dev/null or /dev/full, which a test may lose; skips the test where none can be made."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        path.open("wb").close()
    except PermissionError:
        pytest.skip("devices cannot be made here")
    return path
