"""A node that fails a run is left out of what runs next."""

from __future__ import annotations

from pathlib import Path

from support.cluster_runs import (
    ONE_RUN,
    hurry,
    launch,
    outcomes,
    scontrol,
    site_file,
    squeue,
    sweep,
    wait_for,
    wait_until_it_trains,
)
from support.command_line import asyncpp, succeeded

from asyncpp_cli.launch.common.bad_nodes import excluded_nodes_at
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.profile import find_site

BROKEN = """\
import os, sys
from pathlib import Path

node = os.environ.get("SLURMD_NODENAME", "")
if "train" in sys.orig_argv and node == "{node}":
    sys.exit("RuntimeError: something is wrong with this node")
"""


def test_a_node_on_which_two_runs_do_not_begin_is_left_out(slurm_conf: Path, tmp_path: Path) -> None:
    gpus = tmp_path / "gpus"
    gpus.mkdir()
    (gpus / "sitecustomize.py").write_text(BROKEN.format(node="n3"))
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2", "matrix.seed=[0,1,2]")
    # One job waits for the other, and has n3 alone until two have failed there.
    site = site_file(
        tmp_path, retries=0, environment={"PYTHONPATH": str(gpus)}, exclude="n[1-2]", max_parallel=1
    )
    first, second, third = experiment.runs
    scontrol("update", "NodeName=n4", "State=DRAIN", "Reason=later")
    try:
        launch(experiment.folder, "--replay", site=site)
        wait_for(lambda: outcomes(second), seconds=200, why=lambda: (squeue(), told(experiment.runs)))
    finally:
        scontrol("update", "NodeName=n4", "State=RESUME")
    wait_for(lambda: completed(second, third), seconds=200, why=lambda: (squeue(), told(experiment.runs)))
    assert (outcomes(first), nodes(first, 1)) == ([("failed", "error")], "n3")
    assert outcomes(second) == [("interrupted", "restarted"), ("completed", "")]
    assert [nodes(second, number) for number in (1, 2)] == ["n3", "n4"]
    # It waited when n3 failed the second.
    assert (outcomes(third), nodes(third, 1)) == ([("completed", "")], "n4")
    shown = asyncpp("status", experiment.folder)
    assert "Node n3 is excluded from new attempts until" in shown.errors
    assert f"{first.id}, {second.id}" in shown.errors
    # What is submitted next leaves it out as well.
    assert excluded_nodes_at(find_site(str(site)), experiment, needed=1) == "n[1-2],n3"


def test_a_job_that_slurm_is_requeueing_says_so(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.checkpoint_interval=10", "train.steps=100000")
    (run,) = experiment.runs
    launch(experiment.folder, "--replay", site=site_file(tmp_path, retries=0))
    wait_until_it_trains(run, 1)
    job = Attempt(run, 1).job
    assert job is not None
    scontrol("requeue", job.id)
    wait_until_it_trains(run, 2)
    (file,) = experiment.submissions.glob("*/*.out")
    assert "SLURM has queued it again" in file.read_text()
    succeeded("cancel", experiment.folder)


def completed(*runs: Run) -> bool:
    hurry()
    assert squeue() or all(run.status().state != State.FAILED for run in runs), told(runs)
    return all(run.status().state == State.COMPLETED for run in runs)


def nodes(run: Run, number: int) -> str:
    job = Attempt(run, number).job
    return job.nodes if job else ""


def told(runs: tuple[Run, ...]) -> object:
    return [(run.status(), outcomes(run)) for run in runs]
