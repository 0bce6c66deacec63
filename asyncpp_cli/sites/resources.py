"""Resources that a run needs, and those of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.base.errors import UserError
from stages.config.run_config import RunConfig
from stages.resolve.facts import facts


@dataclass(frozen=True)
class Resources:
    """Resources of a run."""

    ranks: int
    """Ranks of all its pipelines."""
    processes: int
    """One per rank; one in all for replay."""
    threads: int
    """CPU threads of each process."""
    gpus: int
    """One per process, fewer if there are fewer, which the processes then share, or none."""

    @property
    def cores(self) -> int:
        return self.processes * self.threads


@dataclass(frozen=True)
class Machine:
    """Resources of this machine."""

    cores: int
    gpus: tuple[str, ...]
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    gpu_gb: float | None = None
    """Memory of the smallest GPU, 10^9 bytes; None: not known."""


def ranks_of(config: RunConfig) -> int:
    """Number of ranks: those of the schedule, times `parallel.data` pipelines."""
    return facts(config).processes


def resources_of(config: RunConfig, *, replay: bool, machine: Machine) -> Resources:
    """Resources that a run needs on this machine.

    Raises:
        UserError: it needs a GPU and there is none.
    """
    ranks = ranks_of(config)
    processes = 1 if replay else ranks
    gpus = 0 if config.site.device == "cpu" else min(processes, len(machine.gpus))
    if config.site.device == "cuda" and not gpus:
        raise UserError("site.device is cuda, but there are no GPUs here; accepted: auto, cpu")
    return Resources(ranks=ranks, processes=processes, threads=config.site.threads, gpus=gpus)


def this_machine() -> Machine:
    """Cores that this process may use, and GPUs that it sees."""
    gpus = _gpus()
    return Machine(cores=cores_here(), gpus=gpus, gpu_gb=_gpu_gb() if gpus else None)


def cores_here() -> int:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A container may have a smaller CPU quota than it sees cores.
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    return tuple(_asked("index"))


def _gpu_gb() -> float | None:
    """Memory of the smallest GPU here, of those that are hidden from this process, too."""
    sizes = [float(size) for size in _asked("memory.total") if size.isdecimal()]
    return min(sizes) * 2**20 / 1e9 if sizes else None


def _asked(field: str) -> list[str]:
    """What nvidia-smi says of each GPU; nothing where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(
        ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return listed.stdout.split() if listed.returncode == 0 else []
