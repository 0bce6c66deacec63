"""Commands and waits that the tests of the cluster share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from support import launches
from support.command_line import succeeded

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Job, Outcome
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run

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


def wait_for(condition: Callable[[], object], *, seconds: float, why: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s: {why()}"
        time.sleep(0.1)


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


def weights(run: Run) -> str:
    return str(run.metrics()[-1]["weights_sha256"])


def kill_node(node: str, job: Job, *, cluster: Path, noticed: bool = False) -> None:
    """End the daemon of a node and all that a job runs there, without a word.

    SLURM notices after half a minute, or at once if it is told (`noticed`).
    """
    pids = {int((cluster / f"run/slurmd.{node}.pid").read_text())}
    words = {f"SLURMD_NODENAME={node}", f"SLURM_JOB_NAME={job.name}"}
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if words <= set(file.read_bytes().decode(errors="replace").split("\0")):
                pids.add(int(file.parent.name))
                parent = int((file.parent / "stat").read_text().rpartition(")")[2].split()[1])
                if (Path("/proc") / str(parent) / "comm").read_text().startswith("slurmstepd"):
                    pids.add(parent)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if noticed:
        down = ["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed"]
        subprocess.run(down, timeout=60, check=True)


def start_node(name: str) -> None:
    """Start the daemon of a node again, and wait until SLURM has noticed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    subprocess.run([shutil.which("slurmd", path=path) or "slurmd", "-N", name], timeout=60, check=True)
    asked = ["sinfo", "-h", "-n", name, "-p", "main", "-o", "%T"]
    wait_for(
        lambda: (
            subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
            in ("idle", "mixed", "allocated")
        ),
        seconds=60,
    )
