"""A launch that is expected to cost more than the site's `confirm_hours` asks first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.command_line import Terminal, asyncpp, refusal, succeeded
from support.files import contents
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.launch import start
from asyncpp_cli.launch.expected import expected_cost
from asyncpp_cli.planner.cells import expected
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.sites.profile import find_site


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
    [estimate] = expected("trial.yaml", [cell], site=find_site(str(site(folder, 0))))
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
