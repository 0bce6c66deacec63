"""benchmarks/results/time_to_loss.py: lengths on a line, and the ratio of times with its interval."""

from __future__ import annotations

import math

import pytest

from benchmarks.results.delayed_adamw import Arm
from benchmarks.results.time_to_loss import common_slope, page, steps_to, time_ratio


def test_the_slope_is_that_of_a_regression_with_a_height_for_each_seed() -> None:
    # By hand: x = 0, 1, 2 in both seeds, a slope of -0.2, residuals 0.01, -0.02, 0.01 in the first seed.
    # Their squares, 0.0006, over 3 degrees of freedom and the 4 of x: an error of sqrt(5e-5); t is 3.1824.
    e = math.e
    losses = {
        0: {1: 2.01, e: 1.78, e**2: 1.61},
        1: {1: 5.0, e: 4.8, e**2: 4.6},
    }
    line = common_slope(losses)  # type: ignore[arg-type]
    assert line.slope == pytest.approx(-0.2)
    assert line.half_width == pytest.approx(3.1824 * math.sqrt(0.0006 / 3 / 4), rel=1e-4)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({0: {1000: 2.0, 2000: 1.9}}, "2 delayed runs of 1 seeds are too few"),
        ({0: {1000: 2.0}, 1: {1000: 1.9}}, "2 delayed runs of 2 seeds are too few"),
        ({0: {1000: 2.0, 2000: 1.9}, 1: {1000: 1.9, 2000: 2.0}}, "does not fall with the steps"),
    ],
)
def test_what_has_no_slope_is_refused(losses: dict[int, dict[int, float]], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        common_slope(losses)


def test_a_length_is_on_the_line_through_the_mean_of_the_runs() -> None:
    slope = -0.1 / math.log(2)
    losses = {1000: 2.0, 4000: 1.8, 2000: 1.9}
    assert steps_to(1.9, losses, slope) == pytest.approx(2000)
    assert steps_to(1.85, losses, slope) == pytest.approx(2000 * math.sqrt(2))
    assert steps_to(2.1, losses, slope) == pytest.approx(500)


def test_the_interval_has_the_errors_of_seeds_rounds_and_slope() -> None:
    # By hand: logarithms 0.1 apart in two seeds have a half width of 12.706 * 0.05; equal rounds add none.
    middle, low, high = time_ratio([1.0, math.exp(0.1)], [2.0, 2.0], from_slope=0.0)
    assert middle == pytest.approx(math.exp(0.05) / 2)
    assert high / middle == pytest.approx(math.exp(12.7062 * 0.05), rel=1e-4)
    assert low * high == pytest.approx(middle**2)
    wider = time_ratio([1.0, math.exp(0.1)], [2.0, 2.0 * math.exp(0.1)], from_slope=12.7062 * 0.05)
    assert math.log(wider[2] / wider[0]) == pytest.approx(math.sqrt(3) * 12.7062 * 0.05, rel=1e-4)


def arm(schedule: str, steps: int) -> Arm:
    return Arm(steps=steps, settings=(("schedule", schedule), ("optimizer", "muon")))


def test_without_a_synchronous_run_of_a_length_there_is_nothing_to_reach() -> None:
    runs = {
        arm("2bw", steps): {0.1: {0: 2.0 - steps / 1e4, 1: 1.9 - steps / 1e4}} for steps in (500, 1000, 2000)
    }
    with pytest.raises(SystemExit, match="no synchronous muon at a length"):
        page({**runs, arm("1f1b", 3000): {0.1: {0: 1.9}}}, "2bw, muon", [2.0], synchronous_arm="muon")
