"""What a job is to run: the code as it was at the submission, with the interpreter and torch of then.

The code is copied into EXPERIMENT/code/HASH once; the checkout may change while jobs wait. The installed
packages are not copied: a job compares their versions, and refuses to begin if they have changed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asyncpp_cli.code_version import running_stamp, write_stamp
from asyncpp_cli.files import usual_mask

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("asyncpp_cli", "stages", "schedules", "optimizers", "templates")
_ENDINGS = (".py", ".yaml", ".typed")
_COMPARED = ("torch", "numpy", "omegaconf")


def code_hash() -> str:
    """16 hexadecimal digits that change with any line of the code that this process runs."""
    digest = hashlib.sha256()
    for file in _files():
        digest.update(str(file.relative_to(_ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def copy_code(folder: Path) -> Path:
    """Copy the code that this process runs into `folder`/HASH, if it is not there yet."""
    target = folder / code_hash()
    if target.is_dir():
        return target
    folder.mkdir(exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
    try:
        making.chmod(0o777 & ~usual_mask())
        for file in _files():
            copied = making / file.relative_to(_ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)
        write_stamp(running_stamp(), making)
        making.replace(target)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        if not target.is_dir():  # unless another has made it meanwhile
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
    """Versions of what computes: a job that finds others refuses to begin."""
    found = {"python": platform.python_version()}
    for name in _COMPARED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def interpreter() -> str:
    """The Python that jobs run with: this one."""
    return sys.executable


def difference(recorded: Mapping[str, str]) -> str:
    """What has changed since, in words; empty if nothing has."""
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
