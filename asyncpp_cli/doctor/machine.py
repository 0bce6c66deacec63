"""Checks of this machine. torch is loaded in separate processes only."""

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

from asyncpp_cli.doctor.checks import Check, exchanged, good, wrong
from asyncpp_cli.sites.resources import import_path, this_machine
from stages.model.block.compiler import missing_for_compile

_TIMEOUT = 120.0
"""Timeout for two processes that load torch, possibly from a slow disk."""
_GIB = 2**30
_MIN_FREE = _GIB
_RECOMMENDED_FREE = 20 * _GIB
"""With less, checkpoints of all but small models fill the disk."""
NEWEST_TORCH = "2.15"
"""Newest version of torch that asyncpp was tested with (benchmarks/results/torch-versions-2026-11-22.md)."""
_RELEASE = re.compile(r"\d+(\.\d+)*")


def machine_checks(folder: Path) -> Iterator[Check]:
    """Checks of this machine.

    Args:
        folder: folder for experiments.
    """
    yield _python()
    yield cores_check(this_machine().cores, load=os.getloadavg()[0], of_machine=os.cpu_count() or 1)
    found, problem = _run_handshake()
    if found is None:
        yield wrong(
            "torch", problem, advice="install asyncpp, torch with it, into this Python: pip install asyncpp"
        )
        return
    yield torch_check(found["torch"], wanted=_wanted("torch"))
    yield gpu_check(found)
    yield _exchange_check("gloo", found)
    if "nccl" in found:
        yield _exchange_check("nccl", found)
    yield _compiler(device="cuda" if found["gpus"] else "cpu")
    yield folder_check(folder)


def cores_check(cores: int, *, load: float, of_machine: int) -> Check:
    """The cores, and whether they are free.

    Args:
        cores: that this process may use.
        load: load average of the machine over one minute.
        of_machine: cores of the machine.
    """
    detail = f"{cores} for this process: as many ranks train at once without sharing a core"
    # 0.75 of a core: what starts and watches the runs, and the minute before.
    if load < of_machine - 0.75:
        return good("cores", detail)
    note = "throughput measured now says little; wait for other programs to end, or launch elsewhere"
    return good("cores", f"{detail}; load average {load:.1f} on {of_machine} cores", note=note)


def _python() -> Check:
    version = platform.python_version()
    wanted = _wanted("python")
    detail = f"{version}{_wants(wanted)}, {sys.executable}"
    if not within(version, wanted):
        return wrong("python", detail, advice=f"install asyncpp into a Python {wanted}")
    return good("python", detail)


def _wanted(package: str) -> str:
    """Versions of a package (or of `python`) that asyncpp requires, `>=2.11`.

    Empty if asyncpp is used from a checkout without being installed.
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
    """Whether a version is within bounds; a local suffix (`+cu130`) is ignored."""
    numbers = _numbers(version)
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        at_least = numbers >= _numbers(bound)
        if at_least != (sign == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = _RELEASE.match(version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return tuple(numbers + [0] * (4 - len(numbers)))


def torch_check(version: str, *, wanted: str) -> Check:
    """Whether asyncpp takes this version of torch; a note if it is newer than those tested."""
    detail = f"{version}{_wants(wanted)}"
    if within(version, wanted):
        untested = _numbers(version)[:2] > _numbers(NEWEST_TORCH)[:2]
        return good("torch", detail, note=f"newer than {NEWEST_TORCH}, the newest tested" if untested else "")
    return wrong("torch", detail, advice=f"pip install 'torch{wanted}'")


def gpu_check(found: dict[str, Any]) -> Check:
    """Comparing the GPUs that torch sees with those of the driver."""
    gpus = found["gpus"]
    if gpus:
        names = "; ".join(
            f"{number}: {gpu['name']}, {gpu['memory'] / _GIB:.0f} GiB" for number, gpu in enumerate(gpus)
        )
        return good("gpus", f"{names}; CUDA {found['cuda']}, NCCL {found['nccl_version']}")
    driver_gpus = this_machine().gpus
    if not driver_gpus:
        return good("gpus", "none: runs train on the CPU here")
    detail = f"the driver shows {len(driver_gpus)}, torch none (built for CUDA: {found['cuda'] or 'no'})"
    need = "a build for CUDA" if found["cuda"] is None else "a newer driver"
    return wrong("gpus", detail, advice=f"torch needs {need}; otherwise runs train on the CPU")


def _exchange_check(kind: str, found: dict[str, Any]) -> Check:
    if problem := found[kind]:
        advice = {
            "gloo": "allow processes of this machine to connect over the loopback address (127.0.0.1)",
            "nccl": "set NCCL_DEBUG=INFO and start `asyncpp train` with torchrun: NCCL prints where it stops",
        }[kind]
        return wrong(kind, problem, advice=advice)
    return good(kind, f"two processes found each other and exchanged tensors ({exchanged(kind, found)})")


def _compiler(*, device: str) -> Check:
    lacking = missing_for_compile(device=device)
    if lacking is None:
        return good("compiler", "available, for train.compile")
    return good("compiler", lacking, note="only needed for train.compile")


def folder_check(folder: Path) -> Check:
    """Whether a folder can hold experiments: writable, with file locks and space for checkpoints."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".asyncpp-doctor-") as made:
            locks = _locks(Path(made))
            free = shutil.disk_usage(made).free
    except OSError as error:
        return wrong(
            "folder", f"{existing} cannot be written ({error.strerror})", advice="choose another: --dir DIR"
        )
    detail = f"{existing} can be written; {free / _GIB:.1f} GiB free"
    if free < _MIN_FREE:
        return wrong("folder", detail, advice="free some space, or choose another folder: --dir DIR")
    if not locks:
        return good(
            "folder",
            f"{detail}; it has no file locks",
            note="runs work without them; on NFS they can be enabled",
        )
    if free < _RECOMMENDED_FREE:
        note = "checkpoints take about 20 bytes per parameter; a run keeps two (site.keep_checkpoints)"
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


def _run_handshake() -> tuple[dict[str, Any] | None, str]:
    """Result of `stages.comm.handshake` in two processes, or None and the problem."""
    environment = dict(os.environ) | {"PYTHONPATH": import_path(str(Path(__file__).parents[2]))}
    command = [sys.executable, "-P", "-m", "stages.comm.handshake"]
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
            answers = [rank.communicate(timeout=_TIMEOUT) for rank in ranks]
        except subprocess.TimeoutExpired:
            return None, f"it did not load within {_TIMEOUT:g} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    output, errors = answers[0]
    if ranks[0].returncode != 0:
        last = errors.strip().splitlines()[-1:] or [f"exit code {ranks[0].returncode}"]
        return None, last[0][:300]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result, ""
