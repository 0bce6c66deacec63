"""A launch that is expected to cost more than the site's `confirm_hours` asks first."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.command_line import asyncpp, refusal, succeeded
from support.files import contents
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.launch import start
from asyncpp_cli.launch.expected_cost import ExpectedCost, cost_line, expected_cost, question
from asyncpp_cli.planner.cells import expected
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.settle import end_rank
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.sites.profile import find_site


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs to start and a completed one."""
    experiment = ExperimentFolder(tmp_path / "e")
    long = {"train.steps": 10_000_000}
    for seed in range(2):
        experiment.add(settings("2bw", "muon", seed=seed, **long), status=Status(state=State.PENDING))
    experiment.add(settings("1f1b", "muon", **long))
    return tmp_path / "e"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that would be launched."""
    folders: list[Path] = []

    def launch(experiment: Experiment, _: object) -> int:
        folders.append(experiment.folder)
        return 0

    monkeypatch.setattr(start, "launch_locally", launch)
    return folders


def site(folder: Path, confirm_hours: object, gpu: str = "h100") -> Path:
    file = folder.parent / "here.yaml"
    run = f"run: {{gpu: {gpu}}}\n" if gpu else ""
    file.write_text(f"scheduler: local\nconfirm_hours: {confirm_hours}\n{run}")
    return file


def test_the_expected_cost_is_that_of_the_steps_to_train(folder: Path) -> None:
    cost = expected_cost(open_experiment(folder), find_site(str(site(folder, 0))))
    experiment = open_experiment(folder)
    cell = ResolvedCell(experiment.cells[0], experiment.runs[0].config())
    [estimate] = expected("trial.yaml", [cell], site={"gpu": "h100"})
    assert estimate.step_seconds is not None
    # Two ranks each.
    assert cost.gpu_hours == pytest.approx(2 * 10_000_000 * estimate.step_seconds * 2 / 3600)
    assert (cost.runs, cost.unknown) == (2, 0)


@pytest.mark.parametrize(("answer", "starts"), [("y\n", True), ("n\n", False), ("", False)])
def test_it_asks_on_a_terminal(
    folder: Path, launched: list[Path], monkeypatch: pytest.MonkeyPatch, answer: str, starts: bool
) -> None:
    before = contents(folder)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ended = asyncpp("launch", folder, "--site", site(folder, 1))
    assert ended.code == (0 if starts else 1)
    assert "2 runs are expected to take" in ended.errors
    assert "confirm_hours" in ended.errors
    assert launched == ([folder] if starts else [])
    assert contents(folder) == before


def test_without_a_terminal_it_wants_to_be_told(folder: Path, launched: list[Path]) -> None:
    before = contents(folder)
    assert "--yes" in refusal("launch", folder, "--site", site(folder, 1))
    assert (launched, contents(folder)) == ([], before)
    succeeded("launch", folder, "--site", site(folder, 1), "--yes")
    assert launched == [folder]


def test_it_does_not_ask_below_the_bound_and_asks_where_the_cost_is_unknown(
    folder: Path, launched: list[Path]
) -> None:
    succeeded("launch", folder, "--site", site(folder, 1_000_000))
    assert launched == [folder]
    assert "the cost of 2 of 2 runs is unknown" in refusal(
        "launch", folder, "--site", site(folder, 1_000_000, gpu="")
    )


@pytest.mark.parametrize("value", ["-1", "lots", "[1]"])
def test_a_bound_that_is_no_number_is_refused(folder: Path, launched: list[Path], value: str) -> None:
    refused = asyncpp("launch", folder, "--site", site(folder, value))
    assert (refused.code, launched) == (2, [])
    assert "confirm_hours" in refused.errors


def completed_in(run: Run, *, core_hours: float) -> None:
    """Make an attempt on the CPU that has taken these hours."""
    attempt = claim(run, processes=1, replay=True, steps=run.config().train.steps, threads=1)
    assert attempt is not None
    claimed = attempt.description()
    attempt.write(structs.replace(claimed, claimed=claimed.claimed - core_hours * 3600))
    attempt.record_start(0, this_process())
    end_rank(attempt, 0, code=0, signal_number=None, stopped=False)
    steps = run.config().train.steps
    run.write_status(Status(state=State.COMPLETED, attempt=1, step=steps, steps=steps))


def test_on_cpus_the_cost_is_that_of_completed_runs_of_the_same_size(
    tmp_path: Path,
) -> None:
    trial = ExperimentFolder(tmp_path / "e")
    on_cpu = {"site.device": "cpu", "train.steps": 100}
    before = trial.add(settings("2bw", "muon", **on_cpu), status=Status(state=State.PENDING))
    # Another seed and rate, twice the steps; and one of another schedule.
    same = on_cpu | {"optimizer.lr": 0.5, "train.steps": 200}
    trial.add(settings("2bw", "muon", seed=1, **same), status=Status(state=State.PENDING))
    trial.add(settings("1f1b", "muon", **on_cpu), status=Status(state=State.PENDING))
    profile = find_site(str(site(trial.folder, 100, gpu="")))
    nothing = expected_cost(open_experiment(trial.folder), profile)
    assert (nothing.core_hours, nothing.unknown, cost_line(nothing)) == (0.0, 3, "")
    completed_in(before, core_hours=40.0)
    cost = expected_cost(open_experiment(trial.folder), profile)
    assert (cost.runs, cost.unknown, cost.gpu_hours) == (2, 1, 0.0)
    # Some seconds pass between the claim and the end.
    assert cost.core_hours == pytest.approx(80.0, abs=0.2)
    assert cost_line(cost).startswith("Estimated cost: 80")
    assert cost_line(cost).endswith("; unknown for 1 of 2 runs.")


def test_a_cost_on_cpus_above_the_bound_is_asked_for() -> None:
    profile = replace(find_site("local"), confirm_hours=50)
    cost = ExpectedCost(runs=2, gpu_hours=0.0, core_hours=80.0, unknown=0)
    assert "2 runs are expected to take 80 core-hours" in str(question(cost, profile))
    assert question(replace(cost, core_hours=50.0), profile) is None
