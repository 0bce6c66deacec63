"""SLURM's commands, as the tests of the cluster need them."""

from __future__ import annotations

import subprocess
import time
from datetime import datetime


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
    now = time.time()
    for line in squeue("%F_%K", "%r", "%S"):
        job, reason, start = line.split("|")
        if reason == "BeginTime" and datetime.fromisoformat(start).timestamp() > now + 5:
            words = ["scontrol", "update", f"JobId={job}", "StartTime=now+2"]
            subprocess.run(words, timeout=60, check=False, capture_output=True)


def set_partition(state: str) -> None:
    """Whether jobs of the partition `main` begin (`up`), or wait (`down`)."""
    words = ["scontrol", "update", "PartitionName=main", f"State={state}"]
    subprocess.run(words, timeout=60, check=True, capture_output=True)
