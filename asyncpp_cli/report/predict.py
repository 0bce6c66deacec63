"""What the schedule alone predicts, to stand beside what was measured."""

from __future__ import annotations

from schedules.costs import uniform_costs
from schedules.simulate import simulate, steps_to_measure, throughput
from stages.config import RunConfig
from stages.programs import segment_program

MOST_MICROBATCHES = 100_000
"""Forwards to simulate, over all stages. Larger pipelines are left unpredicted: a report is quick."""


def predicted_bubble(config: RunConfig) -> float | None:
    """Share of the steady state in which a rank waits, mean over ranks, in 0..1.

    Every stage computes equally long, a backward takes twice as long as a forward, and messages and updates
    take no time: what remains is the schedule's own. None where the schedule cannot be built.
    """
    # Runs of one schedule differ in much else; the repr holds all of the schedule's fields.
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
