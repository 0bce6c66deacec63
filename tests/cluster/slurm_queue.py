"""SLURM's commands, as the tests of the cluster need them."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta


def squeue(*fields: str) -> list[str]:
    """A line for each job in the queue, array tasks one by one."""
    form = "|".join(fields or ["%F_%K", "%T"])
    asked = subprocess.run(
        ["squeue", "-h", "-r", "-o", form], capture_output=True, text=True, timeout=60, check=True
    )
    return asked.stdout.splitlines()


def hurry() -> None:
    """Let jobs begin soon that were queued again: SLURM makes them wait for two minutes.

    Not at once: a node refuses a job whose credential it revoked in this second, and then the job fails. And
    only once a job, or a start that is put off again and again would never come.
    """
    soon = datetime.now() + timedelta(seconds=5)
    form = "ArrayJobID:20,ArrayTaskID:20,Reason:40,EligibleTime:40"
    asked = subprocess.run(
        ["squeue", "-h", "-r", "-O", form], capture_output=True, text=True, timeout=60, check=True
    )
    for line in asked.stdout.splitlines():
        array, index, reason, start = line.split()
        # Without a time while the job still ends.
        if reason == "BeginTime" and start != "N/A" and datetime.fromisoformat(start) > soon:
            words = ["scontrol", "update", f"JobId={array}_{index}", "StartTime=now+2"]
            subprocess.run(words, timeout=60, check=False, capture_output=True)


def set_partition(state: str) -> None:
    """Whether jobs of the partition `main` begin (`up`), or wait (`down`)."""
    words = ["scontrol", "update", "PartitionName=main", f"State={state}"]
    subprocess.run(words, timeout=60, check=True, capture_output=True)
