"""Intervals of differences of losses that hold the evaluation's error."""

from __future__ import annotations

from statistics import stdev

import numpy as np
import pytest

from asyncpp_cli.report.analysis.statistics import paired
from benchmarks.results.blocks import difference


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
