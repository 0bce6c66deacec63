"""The bubble and the delays that the schedule alone predicts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import schedules
from schedules.analyze import analyze
from schedules.costs import uniform_costs
from schedules.simulate import simulate, steps_to_measure, throughput
from stages.config.run_config import RunConfig
from stages.config.segments import program_options, sync_steps

MOST_MICROBATCHES = 100_000
"""Limit of simulated forwards over all stages, so that a report stays quick."""


def predicted_bubble(config: RunConfig) -> float | None:
    """Share of the steady state in which a rank waits, mean over ranks, in 0..1.

    Assumes equal stages, a backward twice as long as a forward, and messages and updates that take no time.
    None where the schedule cannot be built or is too large, and for a custom schedule: a report
    runs no code that a folder names.
    """
    program = _steady_state(config)
    return None if program is None else _bubble(program)


def predicted_delays(config: RunConfig) -> tuple[int, ...] | None:
    """For each stage, the largest delay of a gradient in updates; None as for `predicted_bubble`."""
    program = _steady_state(config)
    return None if program is None else _delays(program)


_Options = tuple[tuple[str, Any], ...]
"""Of a program: many runs share one."""


def _steady_state(config: RunConfig) -> _Options | None:
    """The program of the schedule itself, after the steps that are synchronous whatever it is."""
    stages, schedule = config.parallel.stages, config.schedule
    steps = steps_to_measure(stages=stages, microbatches=schedule.microbatches, ahead=schedule.ahead)
    steps += schedule.delay
    if schedules.is_custom(schedule.name) or steps * schedule.microbatches * stages > MOST_MICROBATCHES:
        return None
    return tuple(program_options(config, first_step=sync_steps(config), steps=steps).items())


@lru_cache(maxsize=1024)
def _bubble(program: _Options) -> float | None:
    try:
        built = schedules.build(**dict(program))
        return throughput(simulate(built, uniform_costs(built))).bubble
    except ValueError:
        return None


@lru_cache(maxsize=1024)
def _delays(program: _Options) -> tuple[int, ...] | None:
    try:
        return analyze(schedules.build(**dict(program))).delay_max
    except ValueError:
        return None
