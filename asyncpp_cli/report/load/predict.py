"""The bubble and the delays that the schedule alone predicts."""

from __future__ import annotations

from schedules import is_custom
from schedules.analyze import analyze
from schedules.costs import uniform_costs
from schedules.simulate import simulate, steps_to_measure, throughput
from stages.config import RunConfig
from stages.pipeline.segments import segment_program, sync_steps

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


def predicted_delays(config: RunConfig) -> tuple[int, ...] | None:
    """For each stage, the largest delay of a gradient in updates; None as for `predicted_bubble`."""
    if is_custom(config.schedule.name):
        return None
    key = repr((config.schedule, config.parallel.stages, sync_steps(config)))
    if key not in _DELAYS:
        _DELAYS[key] = _delays(config)
    return _DELAYS[key]


_DELAYS: dict[str, tuple[int, ...] | None] = {}


def _delays(config: RunConfig) -> tuple[int, ...] | None:
    stages, schedule = config.parallel.stages, config.schedule
    steps = steps_to_measure(stages=stages, microbatches=schedule.microbatches, ahead=schedule.ahead)
    steps += schedule.delay
    if steps * schedule.microbatches * stages > MOST_MICROBATCHES:
        return None
    try:
        return analyze(segment_program(config, first_step=sync_steps(config), steps=steps)).delay_max
    except ValueError:
        return None
