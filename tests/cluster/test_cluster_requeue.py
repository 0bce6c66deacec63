"""A job that SLURM queues again."""

from __future__ import annotations

from pathlib import Path

from support.cluster_runs import (
    ONE_RUN,
    launch,
    scontrol,
    site_file,
    sweep,
    wait_until_it_trains,
)
from support.command_line import succeeded

from asyncpp_cli.runs.attempts.attempt import Attempt


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
