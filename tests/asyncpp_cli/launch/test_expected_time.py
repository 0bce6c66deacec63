"""What a launch on this machine is expected to take, said before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command_line import succeeded
from support.launches import launch_in_this_process

from asyncpp_cli.launch import expected
from asyncpp_cli.launch.expected import expected_seconds
from asyncpp_cli.launch.local_machine import tasks_of
from asyncpp_cli.planner import here
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.sites.resources import Machine
from stages.config.run_config import RunConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    succeeded("sweep", "quickstart", "matrix.optimizer=[muon]", "train.steps=200", "--out", tmp_path / "e")
    return tmp_path / "e"


def test_long_runs_have_an_expected_time_and_short_ones_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def seconds(configs: Sequence[RunConfig], *, machine: Machine) -> list[float | None]:
        asked.extend(config.train.steps for config in configs)
        return [10.0 * config.train.steps for config in configs]

    monkeypatch.setattr(expected, "seconds_here", seconds)
    runs = open_experiment(folder).runs
    four = Machine(cores=4, gpus=())
    tasks, _ = tasks_of(runs, replay=False, machine=four, pauses={runs[0].id: 100})
    added, sentence = expected_seconds(tasks, machine=four)
    # A pause is the end of a launch. Two runs at a time: each adds half of its time.
    assert asked == [100, 200, 200]
    assert list(added.values()) == [500.0, 1000.0, 1000.0]
    assert sentence.startswith("Expected time on this machine (")
    monkeypatch.setattr(here, "_LONG_FLOPS", 1e15)
    assert expected_seconds(tasks, machine=four) == ({}, "")


def test_where_one_is_unknown_nothing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "seconds_here", lambda configs, **_: [1.0, None, 1.0])
    two = Machine(cores=2, gpus=())
    tasks, _ = tasks_of(open_experiment(folder).runs, replay=False, machine=two)
    assert expected_seconds(tasks, machine=two) == ({}, "")


def test_the_dry_run_of_a_tuning_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def seconds(configs: Sequence[RunConfig], *, machine: Machine) -> list[float | None]:
        steps.extend(config.train.steps for config in configs)
        return [60.0 * 60 for _ in configs]

    monkeypatch.setattr(expected, "seconds_here", seconds)
    words = (
        "tune",
        "quickstart",
        "train.steps=400",
        "--over",
        "optimizer.lr=1e-3:1e-2:log",
        "--samples",
        "4",
    )
    shown = succeeded(*words, "--rungs", "0.25", "--dry-run")
    # Of four candidates in six arms two go on from the first rung.
    assert sorted(steps) == [100] * 12 + [400] * 12
    assert "Expected time on this machine (" in shown.errors


@pytest.mark.slow
def test_the_dry_run_of_a_launch_says_what_it_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_in_this_process(monkeypatch)
    monkeypatch.setattr(expected, "seconds_here", lambda configs, **_: [3600.0 for _ in configs])
    assert "Expected time on this machine (" in succeeded("launch", folder, "--dry-run", "--replay").errors
