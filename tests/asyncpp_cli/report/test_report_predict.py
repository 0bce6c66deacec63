"""The predicted bubble against the known formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpp_cli.report.load.checks import predicted_bubble, predicted_delays
from stages.config.run_config import CorrectionConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainConfig


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


def test_what_is_predicted_for_one_run_is_not_taken_for_another_of_the_same_schedule() -> None:
    """A matrix may vary settings beside `schedule` that change its program: shards are stages, too, and a
    synchronous start ends before the steady state."""
    schedule, stages = ScheduleConfig(name="2bw", microbatches=4), ParallelConfig(stages=2)
    plain = RunConfig(schedule=schedule, parallel=stages, train=TrainConfig(steps=20))
    sharded = replace(plain, parallel=replace(stages, shard_head=True))
    started = replace(plain, correction=CorrectionConfig(name="sync-start"))
    assert predicted_delays(plain) == (1, 1)
    assert predicted_delays(sharded) == (1, 1, 1, 1)
    assert predicted_delays(started) == (1, 1)
    assert predicted_bubble(started) == predicted_bubble(plain) == pytest.approx(0.0, abs=1e-12)
