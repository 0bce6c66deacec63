"""`launch --until`: runs pause at a step, and a later launch goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import asyncpp
from support.launches import rows_of, sweep

from asyncpp_cli.report.load.measure import measure
from asyncpp_cli.report.load.metrics_rows import read_metrics
from asyncpp_cli.runs.attempts.repair import repair_run
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import Cause, State

ONE_RUN = ["matrix={schedule: 2bw, optimizer: muon}", "exclude=[]", "train.steps=9"]


def launched(experiment: Experiment, *options: str) -> tuple[State, int, int]:
    """Launch it; the state, step and attempt of its only run."""
    ended = asyncpp("launch", experiment.folder, "--replay", *options)
    assert ended.code == 0, ended.errors
    (run,) = experiment.runs
    status = run.status()
    assert (status.cause, status.steps) == (Cause.NONE, 9)
    return status.state, status.step, status.attempt


@pytest.mark.slow
def test_paused_runs_go_on(tmp_path: Path) -> None:
    whole, paused = sweep(tmp_path / "whole", *ONE_RUN), sweep(tmp_path / "paused", *ONE_RUN)
    assert whole.cells == paused.cells
    launched(whole)
    assert launched(paused, "--until", "4") == (State.PAUSED, 4, 1)
    assert launched(paused, "--until", "4") == (State.PAUSED, 4, 1), "it is there already"
    assert launched(paused, "--until", "3") == (State.PAUSED, 4, 1), "it is beyond it"
    (run,) = paused.runs
    run.status_file.write_text("{")
    repair_run(run)
    assert (run.status().state, run.status().step) == (State.PAUSED, 4)
    (shown,) = json.loads(asyncpp("status", paused.folder, "--json").output)
    assert (shown["state"], shown["saved_step"], shown["reason"]) == ("paused", 4, "")
    assert [evaluation.step for evaluation in measure(read_metrics(run)).evaluations] == [4]
    assert asyncpp("report", paused.folder).code == 0
    assert launched(paused) == (State.COMPLETED, 9, 2)
    for kind in ("step", "end"):
        assert rows_of(run, kind) == rows_of(whole.runs[0], kind)


def test_a_pause_that_would_change_the_numbers_is_refused(tmp_path: Path) -> None:
    experiment = sweep(
        tmp_path / "e",
        "matrix={schedule: paci, optimizer: adamw}",
        "exclude=[]",
        "train.steps=9",
        "train.clip=stage",
    )
    ended = asyncpp("launch", experiment.folder, "--replay", "--until", "4")
    assert ended.code == 2
    assert "train.eval_interval (500)" in ended.errors
    (run,) = experiment.runs
    assert run.status().state == State.PENDING
    ended = asyncpp("launch", experiment.folder, "--until", "0")
    assert ended.code == 2
