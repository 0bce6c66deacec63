"""Commands and waits that the tests of the cluster share."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from support import launches
from support.command_line import succeeded
from support.launches import runs_attempt, wait_for

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Outcome
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State

TINY = [*launches.TINY, "site.timeout=40"]
ONE_RUN = ["matrix={schedule: 2bw, optimizer: muon}", "exclude=[]", "error_feedback=true"]
SITE = """
partition: main
tasks_per_node: 1
memory: 900M
time: "60"
signal_lead: 45
network_interface: lo
retries: 1
"""


def sweep(folder: Path, *changes: str) -> Experiment:
    """Sweep the quickstart's matrix with tiny runs and these overrides."""
    return launches.sweep(folder, "site.timeout=40", *changes)


def launch(folder: Path, *arguments: str, site: Path) -> str:
    """Submit the runs that are missing; returns standard error."""
    ended = succeeded("launch", folder, "--site", site, *arguments)
    return ended.errors


def site_file(folder: Path, **changes: Any) -> Path:
    """Write the site profile of the test cluster, with these settings changed."""
    file = folder / "site.yaml"
    lines = [line for line in SITE.strip().splitlines() if line.partition(":")[0] not in changes]
    file.write_text("\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in changes.items())]))
    return file


def status_of(folder: Path) -> list[dict[str, Any]]:
    """Output of `asyncpp status --json`."""
    ended = succeeded("status", folder, "--json")
    status: list[dict[str, Any]] = json.loads(ended.output)
    return status


def outcomes(run: Run) -> list[tuple[str, str]]:
    """State and cause of each finished attempt."""
    records = [Attempt(run, number).read(Outcome) for number in range(1, run.status().attempt + 1)]
    return [(outcome.state, outcome.cause) for outcome in records if outcome is not None]


def starts(run: Run) -> list[tuple[int, int]]:
    """Number and first completed step of each attempt."""
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [(row["attempt"], row["step"]) for row in lines if row["kind"] == "start"]


def sbatch(*arguments: str) -> str:
    """Submit a job of ten minutes; its number."""
    command = ["sbatch", "--parsable", "--time=10", *arguments]
    return subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout.strip()


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


def scontrol(*words: str) -> str:
    asked = ["scontrol", *words]
    return subprocess.run(asked, timeout=60, check=True, capture_output=True, text=True).stdout


def set_partition(state: str) -> None:
    """Let jobs of the partition `main` start (`up`) or wait (`down`)."""
    scontrol("update", "PartitionName=main", f"State={state}")


def trains(run: Run, attempt: int) -> bool:
    """Whether the attempt has done something that no attempt before it had saved."""
    hurry()
    return runs_attempt(run, attempt) and run.status().step > (run.saved_step or 0)


def wait_until_it_trains(run: Run, attempt: int) -> None:
    wait_for(lambda: trains(run, attempt), seconds=150, why=lambda: (run.status(), outcomes(run), squeue()))


def has_completed(run: Run) -> bool:
    hurry()
    return run.status().state == State.COMPLETED


def nothing_queued() -> bool:
    hurry()
    return not squeue()


def other_conf(conf: Path, folder: Path, *, without: str, added: Sequence[str] = ()) -> Path:
    """The test cluster's slurm.conf in this folder: without the lines that begin so, and with others."""
    file = folder / "slurm.conf"
    lines = [line for line in conf.read_text().splitlines() if not line.startswith(without)]
    file.write_text("\n".join([*lines, *added]))
    return file


def without_accounting(conf: Path, folder: Path) -> Path:
    """A slurm.conf as users of a cluster without a database have it."""
    return other_conf(conf, folder, without="Accounting")


def without_controller(conf: Path, folder: Path) -> Path:
    """A slurm.conf whose controller does not listen, as while it is restarted."""
    return other_conf(conf, folder, without="SlurmctldPort=", added=["SlurmctldPort=1", "MessageTimeout=2"])


def preempt_all() -> None:
    """Queue a short job of higher priority that takes all nodes."""
    job = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"]
    subprocess.run(["sbatch", *job], timeout=60, check=True, capture_output=True)
