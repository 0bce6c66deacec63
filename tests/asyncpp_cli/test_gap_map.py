"""The map of the gap: the paired gap, and the law."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.results.gap_map import (
    SYNCHRONOUS,
    Length,
    fit,
    gaps_at_best,
    gaps_at_equal,
    reach,
    steps_for,
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


def test_what_does_not_vary_is_not_in_the_law_and_too_few_gaps_are_no_law() -> None:
    law = fit([0.4, 0.2, 0.1], {"steps": [300, 1200, 4800], "parameters": [50_000] * 3})
    assert law is not None
    assert law.names == ["steps"]
    assert fit([0.4, 0.2], {"steps": [300, 1200], "parameters": [50_000] * 2}) is None


def test_a_gap_is_paired_over_the_common_seeds_each_arm_at_its_best_rate() -> None:
    length = Length(optimizer="adamw", parameters=50_000, tokens_per_step=1024, steps=300)
    arms = {
        SYNCHRONOUS: {1e-3: {0: 2.0, 1: 2.1}, 2e-3: {0: 1.9, 1: 2.0}},
        "2bw": {1e-3: {0: 2.1, 1: 2.2, 2: 9.0}},
    }
    [gap] = gaps_at_best({length: arms})
    assert gap.differences == pytest.approx([0.2, 0.2])
    assert gap.lr == 1e-3
    assert gap.interval is not None
    assert gap.interval.half_width == pytest.approx(0, abs=1e-12)


def test_at_equal_rates_a_gap_is_up_to_the_best_synchronous_rate_and_diverged_runs_have_none() -> None:
    length = Length(optimizer="adamw", parameters=50_000, tokens_per_step=1024, steps=300)
    arms = {
        SYNCHRONOUS: {1e-3: {0: 2.0}, 2e-3: {0: 1.9}, 4e-3: {0: 1.8}, 8e-3: {0: 1.9}},
        "2bw": {1e-3: {0: 2.1}, 2e-3: {0: math.inf, 1: 2.0}, 8e-3: {0: 1.95}},
    }
    [gap] = gaps_at_equal({length: arms})
    assert (gap.lr, gap.differences) == (1e-3, [pytest.approx(0.1)])


def test_a_gap_in_steps_is_how_many_times_more_than_a_synchronous_run_needs() -> None:
    # The loss falls by 0.1 with each doubling.
    curve = [(100, 2.2), (200, 2.1), (400, 2.0)]
    assert steps_for(2.15, curve) == pytest.approx(100 * math.sqrt(2))
    assert str(reach(curve, steps=400, gap=0.1, half_width=0.05)) == "2.00 (1.41 to 2.83)"
    assert str(reach(curve, steps=400, gap=0.0, half_width=0.05)) == "1.00 (? to 1.41)"
    assert str(reach(curve, steps=400, gap=0.1, half_width=math.nan)) == "2.00 (? to ?)"
    assert str(reach(curve, steps=100, gap=0.1, half_width=0.05)) == "-"
