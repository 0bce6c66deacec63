"""Analyses a short program that has the same memory and delay as the whole run's program."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import schedules
from schedules import analyze
from schedules.deadlock import sends_in_flight
from schedules.dependencies import POSTED_AHEAD, most_messages
from stages.config import RunConfig
from stages.memory.estimate import Course, course_of
from stages.pipeline.gradient_buffers import gradient_buffers
from stages.pipeline.segments import schedule_costs, schedule_facts
from stages.schedule_validation import tied_problem


class Shape(NamedTuple):
    """The settings that a program depends on."""

    name: str
    stages: int
    microbatches: int
    ahead: int
    delay: int | None
    split: bool
    costs: tuple[int, ...]
    chunks: int
    update_interval: int | None
    several_data_ranks: bool
    on_gpu: bool

    @classmethod
    def of(cls, config: RunConfig) -> Shape:
        schedule, stages = config.schedule, config.parallel.stages
        microbatches, interval = schedule.microbatches, schedule.update_interval or 1
        options = schedules.options_taken(schedule.name)
        ahead = schedule.ahead if "ahead" in options else 1
        enough = 2 * ahead * stages
        member = schedules.FAMILY.get(schedule.name)
        if member is not None and member.bounded_activations and microbatches > enough:
            # More micro-batches change neither peak memory nor delay.
            if schedule_facts(config).stages == stages:
                microbatches = interval * -(-enough // interval)
            elif microbatches % stages == 0:
                microbatches = enough
        delay = schedule.delay if "delay" in options else None
        return cls(
            schedule.name,
            stages,
            microbatches,
            ahead,
            delay,
            schedule.split,
            schedule_costs(config),
            schedule.chunks,
            schedule.update_interval,
            config.parallel.data > 1,
            config.site.device != "cpu",
        )


class Represented(NamedTuple):
    """Facts of a run's program."""

    rank_of_stage: tuple[int, ...]
    delay: int
    course: Course
    buffers: tuple[int, ...]
    """Gradient buffers of each stage."""
    in_flight: int
    """Sends of a kind to one rank that may wait unacknowledged."""
    can_tie: bool
    """Whether embedding and head can share a matrix (`model.tied`)."""


@lru_cache(maxsize=4096)
def represented(shape: Shape) -> Represented:
    """Analyse a short program with the same peak memory and delay as the whole run's.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    alone = shape._replace(several_data_ranks=False, on_gpu=False)
    program = _program(alone)
    delay, course, in_flight, can_tie = _analysed(alone)
    return Represented(
        rank_of_stage=program.rank_of_stage,
        delay=delay,
        course=course,
        buffers=tuple(
            gradient_buffers([program], data_ranks=1 + shape.several_data_ranks, on_gpu=shape.on_gpu)
        ),
        in_flight=in_flight,
        can_tie=can_tie,
    )


def messages(shape: Shape) -> tuple[int, ...]:
    """The most messages that each rank holds at once.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    # A program is the same for every number of data ranks, on any device.
    return _messages(shape._replace(several_data_ranks=False, on_gpu=False))


@lru_cache(maxsize=4096)
def messages_at_most(shape: Shape) -> tuple[int, ...]:
    """An upper bound of `messages`, which takes less time."""
    run = represented(shape)
    bounds = []
    for rank in range(max(run.rank_of_stage) + 1):
        channels, local = set(), 0
        for stage, pair in enumerate(pairwise(run.rank_of_stage)):
            if pair == (rank, rank):
                # Micro-batches that a stage has passed on, and not got back, wait on one side or the other.
                local += max(wholes for wholes, _ in run.course.in_flight[stage])
            elif rank in pair:
                forwards = pair[0] == rank
                channels |= {(sum(pair) - rank, forwards, True), (sum(pair) - rank, not forwards, False)}
        sends = sum(sends for _, sends, _ in channels)
        bounds.append((run.in_flight + 1) * sends + (POSTED_AHEAD + 1) * (len(channels) - sends) + local)
    return tuple(bounds)


@lru_cache(maxsize=4096)
def _messages(shape: Shape) -> tuple[int, ...]:
    program = _program(shape)
    in_flight = represented(shape).in_flight
    return tuple(most_messages(program, common_step=program.updates_together, in_flight=in_flight))


@lru_cache(maxsize=4096)
def _analysed(shape: Shape) -> tuple[int, Course, int, bool]:
    """Delay, course, sends that may wait, and whether embedding and head can share a matrix."""
    program = _program(shape)
    analysis = analyze(program)
    can_tie = tied_problem(program) is None
    return max(analysis.delay_max), course_of([program], [analysis]), sends_in_flight(program), can_tie


@lru_cache(maxsize=16)
def _program(shape: Shape) -> schedules.Program:
    steps = max(3, -(-2 * shape.ahead * shape.stages // shape.microbatches) + 1)
    if shape.name in schedules.FAMILY and schedules.is_synchronous(shape.name):
        steps = 1
    return schedules.build(
        shape.name,
        stages=shape.stages,
        microbatches=shape.microbatches,
        steps=steps,
        ahead=shape.ahead,
        delay=shape.delay,
        split=shape.split,
        costs=shape.costs,
        chunks=shape.chunks,
        update_interval=shape.update_interval,
    )
