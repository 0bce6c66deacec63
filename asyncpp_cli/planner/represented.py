"""What of a run's program its memory and its step time depend on, from a short program in its place."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import schedules
from schedules import analyze
from stages.buffers import gradient_buffers
from stages.config import RunConfig
from stages.memory import Course, course_of


class Shape(NamedTuple):
    """What a program depends on."""

    name: str
    stages: int
    microbatches: int
    ahead: int
    delay: int | None
    chunks: int
    update_interval: int | None
    data: int

    @classmethod
    def of(cls, config: RunConfig) -> Shape:
        schedule, stages = config.schedule, config.parallel.stages
        microbatches, every = schedule.microbatches, schedule.update_interval or 1
        member = schedules.find(schedule.name)
        ahead = schedule.ahead if member.takes_ahead else 1
        enough = 2 * ahead * stages
        if schedule.chunks == 1 and schedule.name != "gpipe" and microbatches > enough:
            # More of them hold no more at once, and make nothing later.
            microbatches = every * -(-enough // every)
        if schedule.chunks > 1 and microbatches > 2 * stages and microbatches % stages == 0:
            microbatches = 2 * stages  # likewise
        taken = schedule.delay if member.takes_delay else None
        return cls(
            schedule.name,
            stages,
            microbatches,
            ahead,
            taken,
            schedule.chunks,
            schedule.update_interval,
            config.parallel.data,
        )


class Represented(NamedTuple):
    """What a run's program comes to."""

    delay: int
    course: Course
    buffers: tuple[int, ...]
    """Gradient buffers of each stage."""


@lru_cache(maxsize=4096)
def represented(shape: Shape) -> Represented:
    """Of a short program that holds as much at once, and is as late, as the whole run.

    Raises:
        schedules.ScheduleError: the schedule cannot be had with these numbers.
    """
    steps = max(3, -(-2 * shape.ahead * shape.stages // shape.microbatches) + 1)
    program = schedules.build(
        shape.name,
        stages=shape.stages,
        microbatches=shape.microbatches,
        steps=1 if schedules.is_synchronous(shape.name) else steps,
        ahead=shape.ahead,
        delay=shape.delay,
        chunks=shape.chunks,
        update_interval=shape.update_interval,
    )
    return Represented(
        delay=max(analyze(program).delay_max),
        course=course_of([program]),
        buffers=tuple(gradient_buffers(shape.name, [program], data_ranks=shape.data)),
    )
