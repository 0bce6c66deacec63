"""The programs of a run's segments. Imports no torch."""

from __future__ import annotations

from functools import lru_cache

import schedules
from optimizers import check_correction
from stages.config import RunConfig, correction_options

SYNCHRONOUS = "1f1b"
"""The schedule of synchronous steps at the start of a run under another."""


def segment_program(config: RunConfig, *, first_step: int, steps: int) -> schedules.Program:
    """The program of steps `first_step .. first_step + steps - 1` of a run.

    Raises:
        schedules.ScheduleError: the schedule cannot be had with these numbers.
    """
    schedule, stages = config.schedule, config.parallel.stages
    member = schedules.find(schedule.name)
    if first_step < sync_steps(config):
        return _build(
            SYNCHRONOUS, stages=stages, microbatches=schedule.microbatches, steps=steps, first_step=first_step
        )
    return _build(
        schedule.name,
        stages=stages,
        microbatches=schedule.microbatches,
        steps=steps,
        first_step=first_step,
        ahead=schedule.ahead if member.takes_ahead else 1,
        delay=schedule.delay if member.takes_delay else None,
        delayed_from=sync_steps(config),
        chunks=schedule.chunks,
        update_interval=schedule.update_interval,
    )


_build = lru_cache(maxsize=2)(schedules.build)


def sync_steps(config: RunConfig) -> int:
    """Steps at the start of the run that are synchronous whatever its schedule (`sync-start`)."""
    if config.correction.name != "sync-start":
        return 0
    settings = check_correction("sync-start", correction_options(config.correction))
    return min(int(settings["sync_steps"]), config.train.steps)
