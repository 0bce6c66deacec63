"""Tuning on a cluster: arrays that are preempted, and jobs that promote, with no process that stays."""

from __future__ import annotations

import json
from pathlib import Path

from support.cluster_runs import (
    TINY,
    hurry,
    nothing_queued,
    outcomes,
    preempt_all,
    site_file,
    squeue,
    wait_for,
)
from support.command_line import asyncpp, succeeded
from support.launches import ONE, rows_of

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from asyncpp_cli.slurm.submissions import read_submissions

STEPS = 400
ARM = [*ONE, f"train.steps={STEPS}"]
TUNE = ["quickstart", *TINY, *ARM, "--over", "optimizer.lr=1e-4:1e-1:log", "--samples", "3", "--eta", "3"]
# A first rung that is long enough to be preempted in.
RUNGS = ["--rungs", "0.8"]
FIRST = 320


def trains(runs: list[Run]) -> bool:
    hurry()
    return any(run.status().state == State.RUNNING and 0 < run.status().step < FIRST for run in runs)


def test_tuned_with_a_preemption(slurm_conf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    site = site_file(tmp_path, retries=0)
    ended = succeeded("tune", *TUNE, *RUNGS, "--out", folder, "--site", site, "--replay")
    assert f"3 runs to step {FIRST}" in ended.errors
    experiment = open_experiment(folder)
    succeeded("tune", folder, "--site", site, "--replay")
    assert len(read_submissions(experiment).all) == 1, "everything due is queued, and a job follows it"

    wait_for(lambda: trains(experiment.runs), seconds=120, why=squeue)
    preempt_all()
    wait_for(nothing_queued, seconds=400, why=squeue)

    shown = asyncpp("tune", folder, "--dry-run", "--json")
    (arm,) = json.loads(shown.output)
    assert arm["complete"], shown.output
    assert arm["steps"] == 3 * FIRST + STEPS - FIRST
    first, second = read_submissions(experiment).all
    assert sorted(first.arrays[0].runs) == sorted(run.id for run in experiment.runs)
    assert list(second.arrays[0].runs) == arm["runs"]
    for run in experiment.runs:
        best = run.id in arm["runs"]
        assert run.status().state == (State.COMPLETED if best else State.PAUSED)
        assert [row["step"] for row in rows_of(run, "step")] == [*range(1, (STEPS if best else FIRST) + 1)]
    # The best is the run that trains alone, to the same weights.
    best_run = experiment.run(arm["runs"][0])
    succeeded("sweep", folder / "resolved.yaml", "--out", tmp_path / "alone")
    undisturbed = open_experiment(tmp_path / "alone").run(best_run.id)
    succeeded("train", undisturbed.folder, "--replay")
    assert rows_of(best_run, "end") == rows_of(undisturbed, "end")
    assert "stopped" in {cause for run in experiment.runs for _, cause in outcomes(run)}
