"""Checks of this machine. torch is loaded in separate processes only."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncpp_cli.doctor.checks import Check, exchanged, good, wrong
from asyncpp_cli.sites.resources import import_path, this_machine

_TIMEOUT = 120.0
"""Timeout for two processes that load torch, possibly from a slow disk."""
_GIB = 2**30
_MIN_FREE = _GIB


def machine_checks(folder: Path) -> Iterator[Check]:
    """Checks of this machine.

    Args:
        folder: folder for experiments.
    """
    found, problem = _run_handshake()
    if found is None:
        yield wrong("torch", problem, advice="install asyncpp, torch with it, into this Python")
        return
    yield gpu_check(found)
    yield _exchange_check("gloo", found)
    if "nccl" in found:
        yield _exchange_check("nccl", found)
    yield folder_check(folder)


def gpu_check(found: dict[str, Any]) -> Check:
    """Comparing the GPUs that torch sees with those of the driver."""
    torch, gpus = f"{found['torch']}, {sys.executable}", found["gpus"]
    if gpus:
        names = "; ".join(
            f"{number}: {gpu['name']}, {gpu['memory'] / _GIB:.0f} GiB" for number, gpu in enumerate(gpus)
        )
        return good("torch", f"{torch}; {names}; CUDA {found['cuda']}, NCCL {found['nccl_version']}")
    driver_gpus = this_machine().gpus
    if not driver_gpus:
        return good("torch", f"{torch}; no GPU: runs train on the CPU here")
    detail = f"the driver shows {len(driver_gpus)}, torch none (built for CUDA: {found['cuda'] or 'no'})"
    need = "a build for CUDA" if found["cuda"] is None else "a newer driver"
    return wrong("torch", detail, advice=f"torch needs {need}; otherwise runs train on the CPU")


def _exchange_check(kind: str, found: dict[str, Any]) -> Check:
    if problem := found[kind]:
        advice = {
            "gloo": "allow processes of this machine to connect over the loopback address (127.0.0.1)",
            "nccl": "set NCCL_DEBUG=INFO and start `asyncpp train` with torchrun: NCCL prints where it stops",
        }[kind]
        return wrong(kind, problem, advice=advice)
    return good(kind, f"two processes found each other and exchanged tensors ({exchanged(kind, found)})")


def folder_check(folder: Path) -> Check:
    """Whether a folder can hold experiments."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".asyncpp-doctor-") as made:
            free = shutil.disk_usage(made).free
            private = Path(made, "private")
            private.touch(mode=0o600)
            private_mode = private.stat().st_mode & 0o777
            folder_mode = _new_folder_mode(Path(made, "folder"))
    except OSError as error:
        return wrong(
            "folder", f"{existing} cannot be written ({error.strerror})", advice="choose another: --dir DIR"
        )
    detail = f"{existing} can be written; {free / _GIB:.1f} GiB free"
    if free < _MIN_FREE:
        return wrong("folder", detail, advice="free some space, or choose another folder: --dir DIR")
    if private_mode & 0o077:
        return wrong(
            "folder",
            f"{existing} keeps no permissions: a file of mode 600 has mode {private_mode:o} there, and ranks "
            "refuse a secret that others may read",
            advice="choose another folder: --dir DIR",
        )
    everybody = "everybody may write what is made there, and so run code as you: umask 022"
    return good("folder", detail, note=everybody if folder_mode & stat.S_IWOTH else "")


def _new_folder_mode(folder: Path) -> int:
    folder.mkdir()
    return folder.stat().st_mode


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
