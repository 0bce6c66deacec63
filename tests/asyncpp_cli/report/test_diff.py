"""`asyncpp diff`: what differs between runs, cells and experiments."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp, succeeded
from support.report_experiment import ExperimentFolder, metrics, settings

import asyncpp as api
from asyncpp_cli.runs.status import State, Status


def rows(loss: float, *, steps: int = 4, **start: Any) -> list[dict[str, Any]]:
    """Rows of a run that ended with this loss; `start` replaces fields of its `start` row."""
    first, *others = metrics(val_losses=(4.0, loss), evaluated=(steps // 2, steps))
    return [first | start, *others]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two experiments: `a` has two cells of two seeds, `b` one of them, longer, elsewhere, and another."""
    a = ExperimentFolder(tmp_path / "a")
    old = {"asyncpp": "0.1.0+gabc", "commit": "abc"}
    for seed, loss in enumerate((3.0, 3.2)):
        a.add(settings("1f1b", "muon", seed=seed), rows=rows(loss, **old), run_id=f"sync-{seed}")
        a.add(settings("2bw", "muon", seed=seed), rows=rows(loss + 0.5, **old), run_id=f"late-{seed}")
    b = ExperimentFolder(tmp_path / "b")
    new = {"asyncpp": "0.1.0+gdef.dirty", "commit": "def-dirty", "torch": "2.14.0", "python": "3.12.0"}
    longer = {"train.steps": 8}
    for seed, loss in enumerate((2.9, 3.0)):
        long_rows = rows(loss, steps=8, **new)
        b.add(settings("1f1b", "muon", seed=seed, **longer), rows=long_rows, run_id=f"long-{seed}")
    b.add(settings("paci", "muon", **longer), rows=rows(9.0, steps=8, **new), run_id="other-0")
    return tmp_path


def differences(*sides: Path) -> dict[str, Any]:
    ended = succeeded("diff", *sides, "--json")
    content: dict[str, Any] = json.loads(ended.output)
    return content


def test_experiments_differ_in_settings_versions_and_losses(folder: Path) -> None:
    found = differences(folder / "a", folder / "b")
    assert found["settings"]["train.steps"] == {"a": [4], "b": [8]}
    assert set(found["settings"]) == {"train.steps", "schedule.name"}
    assert found["conditions"] == {
        "asyncpp": {"a": ["0.1.0+gabc"], "b": ["0.1.0+gdef.dirty"]},
        "commit": {"a": ["abc"], "b": ["def-dirty"]},
        "torch": {"a": ["2.13.0"], "b": ["2.14.0"]},
        "python": {"a": ["3.11.9"], "b": ["3.12.0"]},
    }
    by_cell = {row["cell"]: row for row in found["losses"]}
    [matched] = [row for cell, row in by_cell.items() if "schedule=1f1b" in cell]
    assert (matched["a"], matched["b"]) == (pytest.approx(3.1), pytest.approx(2.95))
    assert matched["difference"] == pytest.approx(-0.15)
    others = [(row["a"], row["b"], row["difference"]) for row in by_cell.values() if row is not matched]
    assert others == [(pytest.approx(3.6), None, None), (None, 9.0, None)]
    assert api.open(folder / "a").diff(api.open(folder / "b")) == {
        key: value for key, value in found.items() if key not in ("a", "b")
    }


def test_a_loss_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "e")
    for schedule, loss in (("1f1b", 3.0), ("2bw", math.nan)):
        experiment.add(settings(schedule, "muon"), rows=rows(loss), run_id=schedule)
    [row] = differences(tmp_path / "e" / "1f1b", tmp_path / "e" / "2bw")["losses"]
    assert (row["a"], row["b"], row["difference"]) == (3.0, None, None)


def test_two_cells_are_compared_whatever_their_axes(folder: Path) -> None:
    found = differences(folder / "a" / "sync", folder / "a" / "late")
    assert found["a"]["runs"] == ["sync-0", "sync-1"]
    assert found["settings"] == {"schedule.name": {"a": ["1f1b"], "b": ["2bw"]}}
    assert found["conditions"] == {}
    [row] = found["losses"]
    assert row["difference"] == pytest.approx(0.5)
    shown = asyncpp("diff", folder / "a" / "runs" / "sync-1", folder / "a" / "late-1").output
    assert "schedule.name  1f1b  2bw" in shown
    assert "+0.500 (one seed)" in shown


def test_all_cells_of_two_schedules_are_compared_by_their_other_axes(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "e")
    for schedule, late in (("1f1b", 0.0), ("2bw", 0.25)):
        for optimizer, loss in (("muon", 3.0), ("adamw", 3.5)):
            for seed in range(2):
                rows_of = rows(loss + late + seed / 8)
                name = f"{schedule}-{optimizer}-{seed}"
                experiment.add(settings(schedule, optimizer, seed=seed), rows=rows_of, run_id=name)
    found = differences(tmp_path / "e" / "1f1b", tmp_path / "e" / "2bw")["losses"]
    assert [row["cell"] for row in found] == ["optimizer=muon", "optimizer=adamw"]
    assert [(row["difference"], row["low"], row["high"]) for row in found] == [(0.25, 0.25, 0.25)] * 2


def test_a_selection_does_not_differ_from_itself(folder: Path) -> None:
    shown = asyncpp("diff", folder / "a", folder / "a").output
    assert "Settings that differ: none." in shown
    assert "Versions, machine and data that differ: none." in shown
    found = differences(folder / "a", folder / "a")
    assert (found["settings"], found["conditions"]) == ({}, {})
    assert {row["difference"] for row in found["losses"]} == {0.0}


def test_runs_without_losses_are_compared_by_their_settings(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "e")
    for schedule in ("1f1b", "2bw"):
        run = experiment.add(settings(schedule, "muon"), status=Status(state=State.PENDING))
        run.metrics_file.unlink()
    shown = succeeded("diff", tmp_path / "e" / "run-0", tmp_path / "e" / "run-1")
    assert "schedule.name  1f1b  2bw" in shown.output
