"""Statistics of the result pages: laws, and intervals that hold the evaluation's error.

Most of what they give is checked in test_recomputed_results, against the pages.
"""

from __future__ import annotations

import math
from statistics import stdev

import numpy as np
import pytest

from asyncpp_cli.report.analysis.statistics import paired
from benchmarks.results.best_rates import best
from benchmarks.results.blocks import difference
from benchmarks.results.gap_map import (
    SYNCHRONOUS,
    Length,
    fit,
    gaps_at_equal,
)

STEPS = [300, 1200, 4800, 300, 1200, 4800]
SIZES = [50_000, 50_000, 50_000, 850_000, 850_000, 850_000]


def test_a_law_without_noise_is_found_and_extrapolated() -> None:
    gaps = [3.0 * steps**-0.5 * size**-0.1 for steps, size in zip(STEPS, SIZES, strict=True)]
    law = fit(gaps, {"steps": STEPS, "parameters": SIZES})
    assert law is not None
    assert list(law.powers) == pytest.approx([math.log(3), -0.5, -0.1])
    middle, low, high = law.predict({"steps": 27_000, "parameters": 360_000_000})
    assert middle == pytest.approx(3.0 * 27_000**-0.5 * 360_000_000**-0.1)
    assert low == pytest.approx(middle) == high


def test_the_law_has_the_least_squares_and_the_intervals_of_a_regression_there() -> None:
    values = [0.31, 0.12, 0.04, 0.26, -0.01, 0.02]
    law = fit(values, {"steps": STEPS, "parameters": SIZES})
    assert law is not None
    x = [[1.0, math.log(steps), math.log(size)] for steps, size in zip(STEPS, SIZES, strict=True)]

    def off(powers: list[float]) -> np.ndarray:
        return np.array([value - math.exp(np.dot(row, powers)) for value, row in zip(values, x, strict=True)])

    least = float(np.sum(off(list(law.powers)) ** 2))
    slopes = []
    for index in range(3):
        for change in (-1e-3, 1e-3):
            moved = list(law.powers)
            moved[index] += change
            assert np.sum(off(moved) ** 2) > least
        moved[index] = law.powers[index] + 1e-6
        slopes.append((off(list(law.powers)) - off(moved)) / 1e-6)
    covariance = least / 3 * np.linalg.inv(np.array(slopes) @ np.array(slopes).T)
    # t of 3 degrees of freedom
    assert law.interval(1) == pytest.approx(3.1824 * math.sqrt(covariance[1, 1]), rel=1e-3)
    at = {"steps": 300, "parameters": 50_000}
    middle, low, high = law.predict(at)
    assert middle == pytest.approx(values[0] - law.residuals[0])
    reach = 3.1824 * math.sqrt(np.array(x[0]) @ covariance @ np.array(x[0]))
    assert (math.log(middle / low), math.log(high / middle)) == pytest.approx((reach, reach), rel=1e-3)


def test_at_equal_rates_a_gap_is_up_to_the_best_synchronous_rate_and_diverged_runs_have_none() -> None:
    length = Length(optimizer="adamw", parameters=50_000, tokens_per_step=1024, steps=300)
    arms = {
        SYNCHRONOUS: {1e-3: {0: 2.0}, 2e-3: {0: 1.9}, 4e-3: {0: 1.8}, 8e-3: {0: 1.9}},
        "2bw": {1e-3: {0: 2.1}, 2e-3: {0: math.inf, 1: 2.0}, 8e-3: {0: 1.95}},
    }
    [gap] = gaps_at_equal({length: arms})
    assert (gap.lr, gap.differences) == (1e-3, [pytest.approx(0.1)])


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


def test_rates_without_a_common_seed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no seed was run at all of the rates 0\.004, 0\.008"):
        best({4e-3: {0: 2.0}, 8e-3: {1: 1.0}})
