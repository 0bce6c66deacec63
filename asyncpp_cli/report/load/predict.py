"""The bubble that the schedule alone predicts."""

from __future__ import annotations

from schedules import is_custom
from schedules.costs import uniform_costs
from schedules.simulate import simulate, steps_to_measure, throughput
from stages.config import RunConfig
from stages.pipeline.segments import segment_program

MOST_MICROBATCHES = 100_000
"""Limit of simulated forwards over all stages, so that a report stays quick."""


def predicted_bubble(config: RunConfig) -> float | None:
    """Share of the steady state in which a rank waits, mean over ranks, in 0..1.

    Assumes equal stages, a backward twice as long as a forward, and messages and updates that take no time.
    None where the schedule cannot be built or is too large, and for a custom schedule: a report
    runs no code that a folder names.
    """
    if is_custom(config.schedule.name):
        return None
    # Many runs share a schedule.
    key = repr((config.schedule, config.parallel.stages))
    if key not in _PREDICTED:
        _PREDICTED[key] = _predict(config)
    return _PREDICTED[key]


_PREDICTED: dict[str, float | None] = {}


def _predict(config: RunConfig) -> float | None:
    stages = config.parallel.stages
    schedule = config.schedule
    steps = steps_to_measure(stages=stages, microbatches=schedule.microbatches, ahead=schedule.ahead)
    if steps * schedule.microbatches * stages > MOST_MICROBATCHES:
        return None
    try:
        program = segment_program(config, first_step=0, steps=steps)
        return throughput(simulate(program, uniform_costs(program))).bubble
    except ValueError:
        return None
