"""Tuning on a cluster: arrays that are preempted, and jobs that promote, with no process that stays."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from support.cluster_runs import (
    TINY,
    hurry,
    nothing_queued,
    outcomes,
    preempt_all,
    set_partition,
    site_file,
    squeue,
    wait_for,
)
from support.command_line import asyncpp, refusal, succeeded
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


def test_a_tuning_holds_to_the_limit_on_jobs(slurm_conf: Path, tmp_path: Path) -> None:
    """Its jobs fill the limit, with the job that promotes and submits what is left; fewer are no tuning."""
    folder = tmp_path / "e"
    tune = ["tune", *TUNE, "train.steps=8", "--rungs", "0.5", "--out", folder, "--replay", "--site"]
    said = refusal(*tune, site_file(tmp_path, submit_limit=2))
    assert "submit_limit: 2: a tuning needs 3" in said
    set_partition("down")
    site = site_file(tmp_path, submit_limit=3, retries=0)
    ended = succeeded(*tune, site)
    assert "2 runs to step 4" in ended.errors
    assert "1 exceed" in ended.errors
    assert len(squeue()) == 3
    (named,) = re.findall(r"or asyncpp (tune .*)", ended.errors)
    assert "1 exceed" in succeeded(*shlex.split(named)).errors
    assert len(squeue()) == 3
    set_partition("up")
    wait_for(nothing_queued, seconds=200, why=squeue)
    (arm,) = json.loads(asyncpp("tune", folder, "--dry-run", "--json").output)
    assert arm["complete"], arm
    submitted = [len(each.arrays[0].runs) for each in read_submissions(open_experiment(folder)).all]
    assert submitted == [2, 1, 1]


def test_a_tuning_that_is_cancelled_submits_nothing_more(slurm_conf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    site = site_file(tmp_path, submit_limit=3)
    set_partition("down")
    succeeded("tune", *TUNE, "train.steps=8", "--out", folder, "--replay", "--site", site)
    one, *_ = open_experiment(folder).runs
    succeeded("cancel", folder, one.id)
    assert len(squeue()) == 2, "what promotes the others stays"
    assert succeeded("cancel", folder).errors == "Cancelled: 1 queued, 0 running.\n"
    assert squeue() == []
