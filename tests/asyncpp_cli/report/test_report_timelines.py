"""The timelines of the page: the measured one as the run wrote it, and the same actions as predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.report_experiment import ExperimentFolder, metrics, report_of, settings

from asyncpp_cli.report.formats.timelines import TimelinePair, timeline_pairs

GOOD: dict[str, Any] = {
    "first_step": 0,
    "steps": 4,
    "steps_kept": 1.0,
    "ranks": [
        [["0F7@3", 0, 100_000], ["0B7@3", 500_000, 700_000], ["0U4", 700_000, 710_000]],
        [["1F7@3", 150_000, 300_000], ["1B7@3", 300_000, 490_000], ["1U4", 490_000, 500_000]],
    ],
}


def timed() -> list[dict[str, Any]]:
    rows = metrics()
    for row in rows:
        if row["kind"] == "segment":
            row["action_seconds"] = {"F": [0.1, 0.15], "B": [0.2, 0.2], "U": [0.01, 0.01]}
    return rows


def pairs_of(folder: Path, *timelines: str | None) -> list[TimelinePair]:
    """Of an experiment with a seed for each of these contents of timeline.json."""
    experiment = ExperimentFolder(folder / "experiment")
    for seed, text in enumerate(timelines):
        run = experiment.add(settings("1f1b", "muon", seed=seed), rows=timed())
        if text is not None:
            run.timeline_file.write_text(text)
    return timeline_pairs(report_of(experiment.folder, keep_steps=False).cells)


def test_the_same_actions_are_measured_and_predicted(tmp_path: Path) -> None:
    [pair] = pairs_of(tmp_path, None, json.dumps({"format": 1} | GOOD))
    assert (pair.problem, pair.unit) == (None, "s")
    assert pair.steps == "The last step before the drain after step 4"
    assert list(pair.measured.starts[1]) == [0.15, 0.3, 0.49]
    assert list(pair.measured.ends[0]) == [0.1, 0.7, 0.71]
    # A micro-batch takes (0.3 + 0.35) / 2 seconds on average, a third of that in the forward. Before it,
    # rank 1 has the forward and the backward of micro-batch 6 to do. Both update once both have a gradient.
    third = 0.325 / 3
    assert pair.predicted.program.actions == pair.measured.program.actions
    assert list(pair.predicted.starts[0]) == pytest.approx([0, 6 * third, 8 * third])
    assert list(pair.predicted.starts[1]) == pytest.approx([3 * third, 4 * third, 8 * third])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        (json.dumps({"format": 99} | GOOD), "a newer asyncpp wrote it"),
        (json.dumps({"first_step": 0}), "has another form"),
        (json.dumps(GOOD | {"ranks": [[["0F7@3", 5, 1]], [["1F7@3", 0, 1]]]}), "has another form"),
        (json.dumps(GOOD | {"ranks": [[["<b>", 0, 1]], [["1F7@3", 0, 1]]]}), "has another form"),
        (json.dumps(GOOD | {"ranks": [[[7, 0, 1]], []]}), "has another form"),
        (json.dumps(GOOD | {"steps": 0}), "has another form"),
    ],
)
def test_a_damaged_timeline_is_named_and_another_one_taken(tmp_path: Path, text: str, said: str) -> None:
    [pair] = pairs_of(tmp_path / "alone", text)
    assert pair.measured is None
    assert said in pair.problem
    [pair] = pairs_of(tmp_path / "with another", text, json.dumps(GOOD))
    assert pair.measured is not None


def test_without_a_timeline_the_prediction_stands_alone(tmp_path: Path) -> None:
    [pair] = pairs_of(tmp_path, None)
    assert (pair.measured, pair.problem, pair.unit) == (None, None, "s")
    assert pair.steps.startswith("The first 4 steps")
