"""Losses by block of the validation text, and intervals that hold the evaluation's error."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from support.launches import train_all
from support.report_experiment import cells_of, report_of

import asyncpp
from asyncpp_cli.report.analysis.statistics import paired
from benchmarks.held_out import blocks_of, difference, rows_of


def test_blocks_have_the_loss_that_the_run_measured_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(np.random.default_rng(0).integers(97, 123, size=200_000, dtype=np.uint8)))
    asyncpp.sweep(
        "quickstart",
        *("matrix.schedule=[1f1b,2bw]", "matrix.optimizer=[muon]", "matrix.error_feedback=[true,false]"),
        *("model=micro", "parallel.stages=1", "schedule.microbatches=1", "train.microbatch_size=8"),
        *("train.steps=4", "train.eval_interval=4", "train.eval_microbatches=16", "data.context=64"),
        f"data.path={text}",
        out=tmp_path / "runs",
    )
    train_all(tmp_path / "runs")
    rows = list(rows_of(str(tmp_path / "runs"), blocks=2, tokens=16 * 8 * 64))
    assert [(row["schedule"], row["error_feedback"]) for row in rows] == [
        ("1f1b", 0.0),
        ("2bw", 1.0),
        ("2bw", 0.0),
    ]
    for row in rows:
        blocks = blocks_of({key: str(value) for key, value in row.items()})
        assert len(blocks) == 2
        # Rounded to six decimals; float32 sums of another batch size.
        assert fmean(blocks) == pytest.approx(row["val_loss"], abs=2e-6)
    # A block of each micro-batch gives the error that the run wrote.
    monkeypatch.setattr("benchmarks.held_out._SEQUENCES", 8)
    rows = list(rows_of(str(tmp_path / "runs"), blocks=16, tokens=16 * 8 * 64))
    expected = {stdev(blocks_of({key: str(value) for key, value in row.items()})) / 4 for row in rows}
    cells = cells_of(tmp_path / "runs")
    assert sorted(cell["val_loss_error"] for cell in cells) == pytest.approx(sorted(expected), abs=2e-6)
    [said] = [line for line in report_of(tmp_path / "runs").conditions if "Standard error" in line]
    assert "nats per token; all runs read the same text" in said


def test_an_interval_without_evaluation_error_is_the_paired_one() -> None:
    changes = [0.01, 0.03, -0.02, 0.04]
    first = {seed: [2 + change, 3 + change] for seed, change in enumerate(changes)}
    second = {seed: [2.0, 3.0] for seed in range(4)}
    found, expected = difference(first, second, comparisons=1), paired(changes)
    assert expected is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.of_evaluation == pytest.approx(0)


def test_blocks_that_differ_widen_the_interval() -> None:
    blocks = [0.01, 0.03, -0.02, 0.04]
    first = dict.fromkeys(range(3), blocks)
    second = {seed: [0.0] * 4 for seed in range(3)}
    found = difference(first, second, comparisons=1)
    assert (found.of_seeds, found.of_evaluation) == pytest.approx((0, stdev(blocks) / 2))
    expected = paired(blocks)
    assert expected is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert difference(first, second, comparisons=8).high > found.high


@pytest.mark.parametrize("shift", [-0.02, 0.0, 0.02])
def test_together_the_intervals_hold_the_truth_in_95_percent(shift: float) -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        hold = True
        for _ in range(4):
            seeds, blocks = random.normal(0, 0.01, 6), random.normal(0, 0.004, 16)
            table = shift + seeds[:, None] + blocks[None, :]
            first = {seed: row.tolist() for seed, row in enumerate(table)}
            found = difference(first, {seed: [0.0] * 16 for seed in range(6)}, comparisons=4)
            hold &= found.low < shift < found.high
        held += hold
    # Bonferroni's intervals hold together in at least 95 % of samples: 400 of them, four standard errors.
    assert held >= 400 * 0.95 - 4 * (400 * 0.95 * 0.05) ** 0.5


def test_what_may_be_said() -> None:
    def found(changes: list[float]) -> str:
        first = {seed: [change, change] for seed, change in enumerate(changes)}
        return difference(first, {seed: [0.0, 0.0] for seed in range(3)}, comparisons=1).verdict(bound=0.01)

    assert found([0.001, 0.0, -0.001]) == "equal"
    assert found([0.05, 0.051, 0.049]) == "higher"
    assert found([-0.05, -0.051, -0.049]) == "lower"
    assert found([-0.05, 0.051, 0.03]) == "undecided"
