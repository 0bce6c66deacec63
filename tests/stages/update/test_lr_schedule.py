"""The learning rate of every schedule follows its formula; what cannot be is refused by key."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.small_runs import replayed, small_config

from stages.config.run_config import OptimizerConfig, changed
from stages.resolve.checks import check
from stages.update.lr_schedule import SCHEDULES, learning_rate_factor


def factors(**changed: Any) -> list[float]:
    config = OptimizerConfig(**{"name": "adamw", "warmup": 0.1, "final_lr": 0.1, **changed})
    return [learning_rate_factor(config, step=step, steps=100) for step in range(101)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_linearly_to_the_peak(schedule: str) -> None:
    rising = factors(schedule=schedule)
    assert rising[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rising[10] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(rising[10:]))


def test_the_default_is_a_cosine_to_the_final_rate() -> None:
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2 for step in range(10, 101)]
    assert factors()[10:] == pytest.approx(expected)
    assert factors() == factors(schedule="cosine")


def test_linear_falls_by_the_same_amount_every_step() -> None:
    expected = [1 - 0.9 * (step - 10) / 90 for step in range(10, 101)]
    assert factors(schedule="linear")[10:] == pytest.approx(expected)


def test_constant_stays_at_the_peak() -> None:
    assert set(factors(schedule="constant")[10:]) == {1.0}


@pytest.mark.parametrize(("share", "start"), [(None, 80), (0.5, 50), (0.9, 10), (0.001, 99)])
def test_wsd_is_stable_and_then_decays_linearly(share: float | None, start: int) -> None:
    measured = factors(schedule="wsd", decay_share=share)
    assert set(measured[10:start]) <= {1.0}
    expected = [1 - 0.9 * (step - start) / (100 - start) for step in range(start, 101)]
    assert measured[start:] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_one_step_has_its_peak_rate(schedule: str) -> None:
    assert learning_rate_factor(OptimizerConfig(name="adamw", schedule=schedule), step=0, steps=1) == 1.0


def test_a_run_takes_the_rates_of_its_schedule() -> None:
    config = small_config("2bw", steps=10)
    config = changed(
        config, {"optimizer": replace(config.optimizer, schedule="wsd", decay_share=0.5, warmup=0.2)}
    )
    check(config)
    rows = replayed(config)
    expected = [
        config.optimizer.lr * learning_rate_factor(config.optimizer, step=step, steps=10)
        for step in range(10)
    ]
    assert [row["lr"] for row in rows.of_kind("step")] == expected
