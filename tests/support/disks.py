"""Disks of a test's own, to be filled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A small disk, mounted at a new folder; without the right to mount one the test is skipped."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False, timeout=60).returncode != 0:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        # Lazily: a job that has just ended may still stand in it.
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


def fill(folder: Path) -> Path:
    """Fill the disk of a folder; returns the file to remove for room."""
    file = folder / "full"
    with file.open("wb", buffering=0) as opened:
        while shutil.disk_usage(folder).free:
            opened.write(bytes(4096))
    return file
