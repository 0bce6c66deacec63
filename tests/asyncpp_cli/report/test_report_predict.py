"""The predicted bubble against the known formulas."""

from __future__ import annotations

import pytest

from asyncpp_cli.report.load.predict import predicted_bubble
from stages.config import ParallelConfig, RunConfig, ScheduleConfig


def predicted(name: str, *, stages: int, microbatches: int) -> float | None:
    schedule = ScheduleConfig(name=name, microbatches=microbatches)
    return predicted_bubble(RunConfig(schedule=schedule, parallel=ParallelConfig(stages=stages)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 2), (4, 8), (3, 1)])
def test_flushing_costs_fill_and_drain(name: str, stages: int, microbatches: int) -> None:
    """(p - 1) of (m + p - 1) slots of each step (arXiv 1811.06965)."""
    expected = (stages - 1) / (microbatches + stages - 1)
    assert predicted(name, stages=stages, microbatches=microbatches) == pytest.approx(expected, abs=1e-12)


def test_2bw_waits_for_nothing() -> None:
    assert predicted("2bw", stages=4, microbatches=8) == pytest.approx(0.0, abs=1e-12)


def test_no_prediction_for_what_cannot_be_built_or_is_too_large_to_simulate() -> None:
    assert predicted("2bw", stages=0, microbatches=8) is None
    assert predicted("1f1b", stages=64, microbatches=4096) is None
