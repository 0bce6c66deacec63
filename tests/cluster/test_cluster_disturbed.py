"""A run that is preempted, requeued, and loses a node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from support.cluster_runs import (
    ONE_RUN,
    launch,
    nothing_queued,
    outcomes,
    preempt_all,
    scontrol,
    site_file,
    squeue,
    starts,
    status_of,
    sweep,
    wait_for,
    wait_until_it_trains,
)
from support.command_line import succeeded
from support.launches import check_same, rows_of

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Job, RankEnd
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from stages.liveness.stop_signal import RESUMABLE

STEPS = 500
CHANGES = [*ONE_RUN, "train.eval_interval=500", "train.checkpoint_interval=100", f"train.steps={STEPS}"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run without a disturbance, in this process."""
    (run,) = sweep(tmp_path_factory.mktemp("undisturbed") / "e", *CHANGES).runs
    succeeded("train", run.folder, "--replay")
    return run


def test_preempted_requeued_and_a_node_killed(slurm_conf: Path, tmp_path: Path, undisturbed: Run) -> None:
    experiment = sweep(tmp_path / "e", *CHANGES)
    (run,) = experiment.runs
    launch(experiment.folder, site=site_file(tmp_path, retries=0))

    # A job of higher priority takes all nodes: the ranks save within the partition's grace time.
    wait_until_it_trains(run, 1)
    preempt_all()
    wait_for(lambda: run.status().state == State.INTERRUPTED, seconds=60, why=run.status)
    saved = run.saved_step
    assert run.status().step == saved == rows_of(run, "step")[-1]["step"]
    ends = [Attempt(run, 1).read(RankEnd, rank) for rank in (0, 1)]
    assert [end and end.code for end in ends] == [RESUMABLE, RESUMABLE]
    wait_for(lambda: status_of(experiment.folder)[0]["job_state"] == "PENDING", seconds=30, why=squeue)

    wait_until_it_trains(run, 2)
    assert starts(run)[-1] == (2, saved)
    job = Attempt(run, 2).job
    assert job is not None
    scontrol("requeue", job.id)

    wait_until_it_trains(run, 3)
    job = Attempt(run, 3).job
    assert job is not None
    killed = nodes_of(job.nodes)[1]
    kill_node(killed, job, cluster=slurm_conf.parents[1])
    try:
        wait_until_it_trains(run, 4)
        last = Attempt(run, 4).job
        assert last is not None
        assert killed not in nodes_of(last.nodes)
    finally:
        start_node(killed)
    wait_for(nothing_queued, seconds=150, why=lambda: (run.status(), squeue()))
    assert (run.status().state, run.status().attempt) == (State.COMPLETED, 4), run.status().reason
    check_same(run, undisturbed)
    causes = [cause for _, cause in outcomes(run)]
    assert causes == ["stopped", "stopped", "restarted", ""]
    (printed,) = experiment.submissions.glob("*/*.out")
    assert "SLURM has queued it again" in printed.read_text()


def nodes_of(nodes: str) -> list[str]:
    return scontrol("show", "hostnames", nodes).split()


def kill_node(node: str, job: Job, *, cluster: Path) -> None:
    """End the daemon of a node and what a job runs there. SLURM notices after half a minute."""
    daemons = {int((cluster / f"run/slurmd.{node}.pid").read_text())}
    words = {f"SLURMD_NODENAME={node}", f"SLURM_JOB_NAME={job.name}"}
    performed = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if words <= set(file.read_bytes().decode(errors="replace").split("\0")):
                performed.add(int(file.parent.name))
                parent = int((file.parent / "stat").read_text().rpartition(")")[2].split()[1])
                if (Path("/proc") / str(parent) / "comm").read_text().startswith("slurmstepd"):
                    daemons.add(parent)
    # Those that would tell SLURM how the job's processes ended go first: a dead node tells nothing.
    for pid in (*daemons, *performed):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
