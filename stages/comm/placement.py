"""Which GPU of its machine a process computes on, and which cores it runs on. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def gpu_of(*, rank: int, local_rank: int, local_size: int, data_ranks: int, gpus: int) -> int:
    """Number of the GPU of a process.

    Networks join GPUs of one number on all machines (rails). On every second machine a pipeline runs through
    the GPUs in reverse, so its two neighbours on different machines have the same number.

    Args:
        rank: of the process; data ranks of a stage are neighbours (`stages.comm.topology`).
        local_rank: its number on its machine.
        local_size: processes on its machine.
        data_ranks: of the run.
        gpus: that the process sees.
    """
    machine, left = divmod(rank - local_rank, local_size)
    if machine % 2 == 0 or left or gpus < local_size or local_size % data_ranks:
        return local_rank % gpus
    place, data = divmod(local_rank, data_ranks)
    return (local_size // data_ranks - 1 - place) * data_ranks + data


def run_near(pci_address: str, *, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Run this process on those of its cores that are next to a GPU, as far as the system tells (Linux).

    Args:
        pci_address: of the GPU, as in `0000:3b:00.0`.
        devices: the system's folder of PCI devices.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # outside Linux there is no affinity
        near = _cores((devices / pci_address / "local_cpulist").read_text())
        # A job's own binding stays: cores outside of it are not ours.
        if cores := os.sched_getaffinity(0) & near:
            os.sched_setaffinity(0, cores)


def _cores(text: str) -> set[int]:
    """The cores of a list such as `0-3,8-11`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
