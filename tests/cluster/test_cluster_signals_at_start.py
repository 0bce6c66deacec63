"""Signals that come while a job is starting cost a run none of its retries."""

from __future__ import annotations

from pathlib import Path

from support.cluster_runs import ONE_RUN, has_completed, launch, outcomes, site_file, squeue, sweep, wait_for
from support.launches import dying

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Outcome
from asyncpp_cli.runs.run_folder import Run


def test_a_run_without_retries_outlives_them(slurm_conf: Path, tmp_path: Path) -> None:
    rank = "asyncpp_cli.launch.common.supervisor"
    early = dying(tmp_path / "early", [(rank, "SIGTERM"), (rank, "SIGUSR2"), ("train", "SIGTERM")])
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2")
    (run,) = experiment.runs
    environment = {"PYTHONPATH": str(early)}
    launch(experiment.folder, "--replay", site=site_file(tmp_path, retries=0, environment=environment))
    wait_for(lambda: has_completed(run), seconds=300, why=lambda: (squeue(), reasons(run)))
    assert outcomes(run) == [("interrupted", "stopped")] * 3 + [("completed", "")]
    assert reasons(run)[:3] == [
        "told to end by SIGTERM while the ranks were starting",
        "told to end by SIGUSR2 while the ranks were starting",
        "rank 0 was told to end by SIGTERM",
    ]


def reasons(run: Run) -> list[str]:
    read = [Attempt(run, number).read(Outcome) for number in range(1, run.status().attempt + 1)]
    return [outcome.reason for outcome in read if outcome is not None]
