"""Snapshots of the code that jobs run, so that the checkout may change while they are queued.

The code is copied once into EXPERIMENT/code/HASH. Installed packages are not copied; a job compares their
versions and refuses to start if they have changed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asyncpp_cli.base.atomic_files import folder_at_once
from asyncpp_cli.base.version import running_stamp, write_stamp

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("asyncpp", "asyncpp_cli", "stages", "schedules", "optimizers", "templates")
_ENDINGS = (".py", ".yaml", ".typed")
_COMPARED = ("torch", "numpy")


def code_hash() -> str:
    """Hash of the code that this process runs: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in _files():
        digest.update(str(file.relative_to(_ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def copy_code(folder: Path) -> Path:
    """Copy the code that this process runs into `folder`/HASH, unless it exists; returns that folder."""
    target = folder / code_hash()
    if target.is_dir():
        return target
    try:
        with folder_at_once(target) as making:
            for file in _files():
                copied = making / file.relative_to(_ROOT)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)
            write_stamp(running_stamp(), making)
    except OSError:
        if not target.is_dir():  # unless another process has made it
            raise
    return target


def _files() -> list[Path]:
    files = []
    for package in _PACKAGES:
        for folder, folders, names in os.walk(_ROOT / package):
            folders[:] = [name for name in folders if name != "__pycache__"]
            files += [Path(folder) / name for name in names if name.endswith(_ENDINGS)]
    return sorted(files)


def software() -> dict[str, str]:
    """Versions of Python and the packages that affect the numbers."""
    found = {"python": platform.python_version()}
    for name in _COMPARED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def interpreter() -> str:
    """The Python interpreter that jobs run with: this one."""
    return sys.executable


def difference(recorded: Mapping[str, str]) -> str:
    """Describes which versions differ from the recorded ones; empty if none."""
    now = software()
    changed = [
        f"{name} was {before} and is {now.get(name, 'missing')}"
        for name, before in recorded.items()
        if now.get(name) != before
    ]
    return ", ".join(changed)


def file_hash(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
