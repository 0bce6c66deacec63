"""SLURM's commands, as the tests of the cluster need them."""

from __future__ import annotations

import subprocess


def squeue(*fields: str) -> list[str]:
    """A line for each job in the queue, array tasks one by one."""
    form = "|".join(fields or ["%F_%K", "%T"])
    asked = subprocess.run(
        ["squeue", "-h", "-r", "-o", form], capture_output=True, text=True, timeout=60, check=True
    )
    return asked.stdout.splitlines()


def hurry() -> None:
    """Let jobs begin that were queued again: SLURM makes them wait for two minutes."""
    for line in squeue("%F_%K", "%r"):
        job, _, reason = line.partition("|")
        if reason == "BeginTime":
            words = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
            subprocess.run(words, timeout=60, check=False, capture_output=True)


def set_partition(state: str) -> None:
    """Whether jobs of the partition `main` begin (`up`), or wait (`down`)."""
    words = ["scontrol", "update", "PartitionName=main", f"State={state}"]
    subprocess.run(words, timeout=60, check=True, capture_output=True)
