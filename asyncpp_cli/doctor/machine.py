"""What a run needs of the machine that it is on. torch is asked in processes of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.resources import this_machine
from asyncpp_cli.doctor.checks import Check, good, wrong
from stages.compiler import missing_for_compile

_SECONDS = 120.0
"""For two processes that load torch, from a slow disk too."""
_GIB = 2**30
_LITTLE = _GIB
_SPACE_OF_MANY = 20 * _GIB
"""Below it, runs of more than a small model fill the disk with checkpoints."""
_RELEASE = re.compile(r"\d+(\.\d+)*")


def machine_checks(folder: Path) -> Iterator[Check]:
    """The checks of this machine, one by one.

    Args:
        folder: where experiments are to lie.
    """
    yield _python()
    cores = this_machine().cores
    yield good("cores", f"{cores} for this process: as many ranks train at once without sharing one")
    found, why = _shaken_hands()
    if found is None:
        yield wrong(
            "torch", why, advice="install asyncpp, torch with it, into this Python: pip install asyncpp"
        )
        return
    yield torch_check(found["torch"], wanted=_wanted("torch"))
    yield gpu_check(found)
    yield _talk("gloo", found["gloo"])
    if "nccl" in found:
        yield _talk("nccl", found["nccl"])
    yield _compiler(device="cuda" if found["gpus"] else "cpu")
    yield folder_check(folder)


def _python() -> Check:
    version = platform.python_version()
    wanted = _wanted("python")
    detail = f"{version}{_wants(wanted)}, {sys.executable}"
    if not within(version, wanted):
        return wrong("python", detail, advice=f"install asyncpp into a Python {wanted}")
    return good("python", detail)


def _wanted(package: str) -> str:
    """The versions of a package (or of `python`) that asyncpp asks for, `>=2.11,<2.14`.

    Empty where asyncpp is used from a checkout without being installed.
    """
    try:
        asyncpp = metadata.metadata("asyncpp")
    except metadata.PackageNotFoundError:
        return ""
    if package == "python":
        return str(asyncpp["Requires-Python"])
    for requirement in asyncpp.get_all("Requires-Dist") or []:
        named = re.fullmatch(r"([\w.-]+)\s*\(?([^;)]*)\)?", requirement)
        if named and named[1] == package:
            return named[2].strip()
    return ""


def _wants(versions: str) -> str:
    return f" (wanted: {versions})" if versions else ""


def within(version: str, wanted: str) -> bool:
    """Whether a version is as a list of bounds wants it; what a build adds (`+cu130`) does not count."""
    mine = _numbers(version)
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        at_least = mine >= _numbers(bound)
        if at_least != (sign == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = _RELEASE.match(version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return tuple(numbers + [0] * (4 - len(numbers)))


def torch_check(version: str, *, wanted: str) -> Check:
    """Whether torch is of a version that asyncpp is tested with."""
    detail = f"{version}{_wants(wanted)}"
    if within(version, wanted):
        return good("torch", detail)
    return wrong("torch", detail, advice=f"pip install 'torch{wanted}'")


def gpu_check(found: dict[str, Any]) -> Check:
    """The GPUs that torch sees, beside those that the driver does."""
    gpus = found["gpus"]
    if gpus:
        names = "; ".join(
            f"{number}: {gpu['name']}, {gpu['memory'] / _GIB:.0f} GiB" for number, gpu in enumerate(gpus)
        )
        return good("gpus", f"{names}; CUDA {found['cuda']}, NCCL {found['nccl_version']}")
    there = this_machine().gpus
    if not there:
        return good("gpus", "none: runs train on the CPU here")
    detail = f"the driver shows {len(there)}, torch none (built for CUDA: {found['cuda'] or 'no'})"
    why = "a build for CUDA" if found["cuda"] is None else "a driver that is new enough for it"
    return wrong("gpus", detail, advice=f"torch needs {why}; without, runs train on the CPU")


def _talk(kind: str, problem: str) -> Check:
    if problem:
        advice = {
            "gloo": "let processes of one machine reach each other over the loopback address (127.0.0.1)",
            "nccl": "set NCCL_DEBUG=INFO and start `asyncpp train` by torchrun: NCCL says where it stops",
        }[kind]
        return wrong(kind, problem, advice=advice)
    return good(kind, "two processes found each other and exchanged numbers")


def _compiler(*, device: str) -> Check:
    lacking = missing_for_compile(device=device)
    if lacking is None:
        return good("compiler", "there is one, for train.compile: true")
    return good("compiler", lacking, note="runs with train.compile: true need it; others do not")


def folder_check(folder: Path) -> Check:
    """Whether experiments can lie in a folder: written, locked, and with room for checkpoints."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".asyncpp-doctor-") as made:
            locks = _locks(Path(made))
            free = shutil.disk_usage(made).free
    except OSError as error:
        return wrong(
            "folder", f"{there} cannot be written ({error.strerror})", advice="name another: --dir DIR"
        )
    detail = f"{there} can be written; {free / _GIB:.1f} GiB free"
    if free < _LITTLE:
        return wrong("folder", detail, advice="make room, or name another folder: --dir DIR")
    if not locks:
        return good(
            "folder", f"{detail}; it has no file locks", note="runs go without them; NFS can be given locks"
        )
    if free < _SPACE_OF_MANY:
        note = "a checkpoint takes about 20 bytes a parameter, and each run keeps two (site.keep_checkpoints)"
        return good("folder", detail, note=note)
    return good("folder", detail)


def _locks(folder: Path) -> bool:
    import fcntl

    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return False
        return True


def _shaken_hands() -> tuple[dict[str, Any] | None, str]:
    """What `stages.handshake` found, or else why it did not."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = dict(os.environ) | {"PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", "stages.handshake"]
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as folder:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), folder, "here"],
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        try:
            answers = [rank.communicate(timeout=_SECONDS) for rank in ranks]
        except subprocess.TimeoutExpired:
            return None, f"it was not loaded within {_SECONDS:g} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    output, errors = answers[0]
    if ranks[0].returncode != 0:
        last = errors.strip().splitlines()[-1:] or [f"exit code {ranks[0].returncode}"]
        return None, last[0][:300]
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found, ""
