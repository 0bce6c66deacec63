"""Scores of a run's checkpoints, by a job that follows it on a cluster."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.cluster_runs import ONE_RUN, TINY, launch, site_file, sweep, wait_for
from support.command_line import succeeded
from support.slurm_queue import hurry, squeue
from support.small_task import write_task

from asyncpp_cli.experiment.run_data import owners_of
from asyncpp_cli.runs.scores import scores_of
from asyncpp_cli.runs.status import State

pytestmark = pytest.mark.skipif(
    not (find_spec("lm_eval") and find_spec("accelerate")), reason="the extra eval is not installed"
)


@pytest.mark.timeout(900)
def test_a_job_follows_the_checkpoints_of_a_run(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *TINY, *ONE_RUN, "train.steps=40", "train.checkpoint_interval=20")
    [run] = experiment.runs
    site = site_file(tmp_path)
    task = write_task(tmp_path / "tasks")
    # Queued before the run has begun.
    said = succeeded("evaluate", run.folder, "--tasks", task, "--site", site, "--limit", "2")
    assert f"scores the checkpoints of {run.id}" in said.output
    launch(experiment.folder, site=site)

    def done() -> bool:
        hurry()
        return not squeue()

    outputs = lambda: [file.read_text() for file in experiment.submissions.glob("*/evaluate-*.out")]  # noqa: E731
    wait_for(done, seconds=700, why=lambda: (squeue(), outputs()))
    assert run.status().state == State.COMPLETED
    scores, problems = scores_of(run, owners_of(run)[0])
    assert (problems, scores[-1].step, scores[-1].samples) == ([], 40, 2), outputs()
    assert "step 40: small_choice acc " in "".join(outputs())
