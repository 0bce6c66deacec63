"""benchmarks/time_to_loss.py: interpolated lengths, and the ratio of times with its interval."""

from __future__ import annotations

import math

import pytest

from benchmarks.delay_candidates import Arm
from benchmarks.time_to_loss import page, steps_to, time_ratio


def test_a_length_between_two_is_on_a_line_over_the_logarithm() -> None:
    losses = {1000: 2.0, 4000: 1.8, 2000: 1.9}
    assert steps_to(1.9, losses) == pytest.approx(2000)
    assert steps_to(1.85, losses) == pytest.approx(2000 * math.sqrt(2))
    assert steps_to(2.0, losses) == pytest.approx(1000)


def test_a_loss_beyond_the_lengths_tried_has_no_length() -> None:
    assert steps_to(1.7, {1000: 2.0, 2000: 1.9}) is None
    assert steps_to(2.1, {1000: 2.0, 2000: 1.9}) is None


def test_the_interval_has_the_errors_of_seeds_and_of_rounds() -> None:
    # By hand: logarithms 0.1 apart in two seeds have a half width of 12.706 * 0.05; equal rounds add none.
    middle, low, high = time_ratio([1.0, math.exp(0.1)], [2.0, 2.0])
    assert middle == pytest.approx(math.exp(0.05) / 2)
    assert high / middle == pytest.approx(math.exp(12.7062 * 0.05), rel=1e-4)
    assert low * high == pytest.approx(middle**2)
    wider = time_ratio([1.0, math.exp(0.1)], [2.0, 2.0 * math.exp(0.1)])
    assert math.log(wider[2] / wider[0]) == pytest.approx(math.sqrt(2) * 12.7062 * 0.05, rel=1e-4)


def arm(schedule: str, steps: int) -> Arm:
    return Arm(steps=steps, settings=(("schedule", schedule), ("optimizer", "adamw")))


def test_a_page_of_two_lengths() -> None:
    text = page(
        {
            arm("1f1b", 1000): {0.1: {0: 1.9, 1: 1.95}},
            arm("2bw", 1000): {0.1: {0: 2.0, 1: 2.0}},
            arm("2bw", 2000): {0.1: {0: 1.8, 1: 1.9}},
        },
        "2bw, adamw",
        [2.0, 2.0],
    )
    assert "| 0 | 1.9000 | 2.0000 | 1.8000 | 1,414 | 1.414 |" in text
    assert "Time to the synchronous loss: 0.707 of the synchronous time" in text
