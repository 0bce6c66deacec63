"""SLURM commands for the tests of the cluster."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta


def squeue(*fields: str) -> list[str]:
    """One line for each job in the queue; array tasks are listed one by one."""
    form = "|".join(fields or ["%F_%K", "%T"])
    ended = subprocess.run(
        ["squeue", "-h", "-r", "-o", form], capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.splitlines()


def hurry() -> None:
    """Start requeued jobs soon: SLURM delays them by two minutes.

    Not at once: a node refuses a job whose credential it revoked in the same second, and the job fails. Only
    once for each job, or repeated calls would postpone its start for ever.
    """
    soon = datetime.now() + timedelta(seconds=5)
    form = "ArrayJobID:20,ArrayTaskID:20,Reason:40,EligibleTime:40"
    ended = subprocess.run(
        ["squeue", "-h", "-r", "-O", form], capture_output=True, text=True, timeout=60, check=True
    )
    for line in ended.stdout.splitlines():
        array, index, *reason, start = line.split()
        # The start time is N/A while the job is still completing.
        if (
            reason[0] in ("BeginTime", "ReqNodeNotAvail,")
            and start != "N/A"
            and datetime.fromisoformat(start) > soon
        ):
            command = ["scontrol", "update", f"JobId={array}_{index}", "StartTime=now+2"]
            subprocess.run(command, timeout=60, check=False, capture_output=True)


def set_partition(state: str) -> None:
    """Let jobs of the partition `main` start (`up`) or wait (`down`)."""
    command = ["scontrol", "update", "PartitionName=main", f"State={state}"]
    subprocess.run(command, timeout=60, check=True, capture_output=True)


def preempt_all() -> None:
    """Queue a short job of higher priority that takes all nodes."""
    job = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"]
    subprocess.run(["sbatch", *job], timeout=60, check=True, capture_output=True)
