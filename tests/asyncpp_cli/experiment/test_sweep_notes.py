"""What a sweep says of cells that may not be what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.templates import cells_of

from asyncpp_cli.experiment.sweep_notes import notes


def notes_of(folder: Path, schedules: list[str], *changes: str) -> list[str]:
    train = {"steps": 40, "clip": "stage"}
    template = {"matrix": {"schedule": schedules}, "optimizer": "muon", "train": train}
    return notes(cells_of(folder, template, "train.clip=stage", "schedule.microbatches=4", *changes))


def test_a_schedule_that_makes_more_updates_is_named(tmp_path: Path) -> None:
    [said] = notes_of(tmp_path, ["1f1b", "pipedream", "paci"])
    assert said.startswith("pipedream makes 4 updates per step, 160 in 40 steps; schedule.update_interval=4")


@pytest.mark.parametrize(
    ("schedules", "change"),
    [(["1f1b", "pipedream", "paci"], "schedule.update_interval=4"), (["pipedream"], "seed=1")],
    ids=["as many", "one schedule"],
)
def test_schedules_that_make_as_many_updates_are_not(
    schedules: list[str], change: str, tmp_path: Path
) -> None:
    assert notes_of(tmp_path, schedules, change) == []
