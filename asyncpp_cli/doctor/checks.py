"""Checks of this machine, and whether a cluster takes the jobs of a site profile.

torch is loaded in separate processes only.
"""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.import_path import environment_of_program
from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.sbatch import BatchJob, profile_keys
from asyncpp_cli.sites.profile import Site
from asyncpp_cli.sites.resources import this_machine
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import SlurmError

_TIMEOUT = 120.0
"""Timeout for two processes that load torch, possibly from a slow disk."""
_GIB = 2**30
_MIN_FREE = _GIB


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check."""

    check: str
    """Name of the check."""
    ok: bool
    """Whether runs can work."""
    detail: str
    """What was found."""
    advice: str = ""
    """What to change; if ok, what could be better or does not work."""

    @property
    def verdict(self) -> str:
        """`ok`, `note` (ok, with advice) or `wrong`."""
        if not self.ok:
            return "wrong"
        return "note" if self.advice else "ok"


def good(check: str, detail: str, *, note: str = "") -> Check:
    """A check that passed."""
    return Check(check=check, ok=True, detail=detail, advice=note)


def wrong(check: str, detail: str, *, advice: str) -> Check:
    """A check that failed."""
    return Check(check=check, ok=False, detail=detail, advice=advice)


def exchanged(kind: str, handshake: dict[str, Any]) -> str:
    """Library, transport and rate of an exchange, as far as `stages.comm.handshake` knows them."""
    transport, rate = handshake.get(f"{kind}_transport"), handshake.get(f"{kind}_rate")
    by = f"{kind} by {transport}" if transport else kind
    return by if rate is None else f"{by}, {rate:.3g} GB/s"


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
            new_folder = Path(made, "folder")
            new_folder.mkdir()
            folder_mode = new_folder.stat().st_mode
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


def _run_handshake() -> tuple[dict[str, Any] | None, str]:
    """Result of `stages.comm.handshake` in two processes, or None and the problem."""
    command = [sys.executable, "-m", "stages.comm.handshake"]
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as folder:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), folder, "here"],
                env=environment_of_program(),
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


def submission_check(site: Site) -> Check:
    """Whether sbatch accepts the script of the largest job that the profile allows; nothing is queued."""
    cpus = site.cpus_per_task or int(site.run.get("threads", 1))
    bounds = (site.gpus_per_node, site.tasks_per_node, (site.cpus_per_node or 0) // cpus)
    ranks, nodes = min((bound for bound in bounds if bound), default=1), site.max_nodes or 1
    shape = JobShape(
        nodes=nodes,
        tasks=ranks * nodes,
        tasks_per_node=ranks,
        cpus_per_task=cpus,
        gpus_per_node=ranks if site.gpus_per_node else 0,
    )
    job = BatchJob(name="asyncpp-doctor", shape=shape, tasks=1, command=sbatch.array_command(""), code="")
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as made:
        file = Path(made) / "job.sh"
        file.write_text(sbatch.script(site, Path(made), job))
        try:
            slurm.run_command(["sbatch", "--test-only", f"--chdir={made}", str(file)])
        except SlurmError as error:
            advice = f"change {site.file}: {profile_keys(str(error))}: sbatch refuses a job of {shape}"
            return wrong("submission", str(error), advice=advice)
    return good("submission", f"sbatch accepts a job of {shape} (--test-only)")
