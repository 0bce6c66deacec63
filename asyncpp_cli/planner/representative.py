"""Analyses a short program that has the same memory and delay as the whole run's program."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import gcd
from operator import mul
from typing import Any, NamedTuple

import schedules
from asyncpp_cli.planner.kept import kept
from schedules.analyze import staleness
from schedules.costs import Costs
from schedules.deadlock import sends_in_flight
from schedules.dependencies import POSTED_AHEAD, most_messages
from schedules.flow import Flow, flow_between, seconds_between_ends
from schedules.head_shards import EMBEDDED_AHEAD
from schedules.messages import Kind, channels_between_ranks
from schedules.segment import delay_for_lead
from schedules.simulate import microbatches_to_fill, seconds_between, simulate
from stages.config.run_config import RunConfig
from stages.config.segments import has_tied_shards, schedule_facts, schedule_options
from stages.memory.estimate import Course, course_of, planned_on_gpu
from stages.resolve.schedule import tied_problem
from stages.weights.gradient_buffers import gradient_buffers

Sizes = tuple[int, ...]
"""Of each kind of message, in the order of `Kind`."""


class Shape(NamedTuple):
    """The settings that a program depends on."""

    name: str
    stages: int
    microbatches: int
    options: tuple[tuple[str, Any], ...]
    """Of the schedule, by name."""
    shard_head: bool
    tied_shards: bool
    several_data_ranks: bool
    on_gpu: bool

    @classmethod
    def of(cls, config: RunConfig) -> Shape:
        schedule, stages = config.schedule, config.parallel.stages
        microbatches, options = schedule.microbatches, schedule_options(config)
        interval = options.get("update_interval", 1)
        shard_head = config.parallel.shard_head
        enough = _enough(stages, options.get("ahead", 1), shard_head=shard_head)
        member = schedules.FAMILY.get(schedule.name)
        in_rounds = schedule_facts(config).stages == stages or microbatches % stages == 0
        if member is not None and member.bounded_activations and microbatches > enough and in_rounds:
            microbatches = interval * -(-enough // interval)
        return cls(
            schedule.name,
            stages,
            microbatches,
            tuple(options.items()),
            shard_head,
            has_tied_shards(config),
            config.parallel.data > 1,
            planned_on_gpu(config),
        )


def without_shards(config: RunConfig) -> Shape:
    """The shape with the whole head in the last stage: its micro-batches in flight are a lower bound of those
    with shards, and more layouts share it."""
    shape = Shape.of(replace(config, parallel=replace(config.parallel, shard_head=False)))
    return _alone(shape)


PERIOD = 6
"""Micro-batches after which the order of actions repeats where nothing flushes them, or a multiple."""


def _enough(stages: int, ahead: int, *, shard_head: bool) -> int:
    """Micro-batches beyond which more of them change neither peak memory nor delay: with shards of the head
    stages run one forward further ahead."""
    return (2 * ahead + shard_head) * stages


class Represented(NamedTuple):
    """Facts of a run's program."""

    rank_of_stage: tuple[int, ...]
    delay: int
    course: Course
    buffers: tuple[int, ...]
    """Gradient buffers of each stage."""
    fill: int
    """Micro-batches with which the pipeline is full."""


@kept
def represented(shape: Shape) -> Represented:
    """Analyse a short program with the same peak memory and delay as the whole run's.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    program = _program(_alone(shape))
    delay, course = _analysed(_alone(shape))
    return Represented(
        rank_of_stage=program.rank_of_stage,
        delay=delay,
        course=course,
        buffers=tuple(
            gradient_buffers([program], data_ranks=1 + shape.several_data_ranks, on_gpu=shape.on_gpu)
        ),
        fill=microbatches_to_fill(program),
    )


def delay_of(shape: Shape) -> int:
    """The delay of `represented`; declared by some schedules, which takes no program."""
    declared = schedules.FAMILY.get(shape.name)
    if declared is not None and declared.synchronous:
        return 0
    delay = dict(shape.options).get("delay")
    return represented(shape).delay if delay is None else int(delay)


def smallest_delay(
    name: str, *, stages: int, microbatches: int, shard_head: bool = False, **options: Any
) -> int:
    """As `schedules.smallest_delay`, remembered."""
    lead = least_lead(name, stages=stages, shard_head=shard_head, **options)
    return 1 if lead is None else delay_for_lead(lead=lead, microbatches=microbatches)


least_lead = kept(schedules.catalogue.least_lead)
"""As the function of that name: for a schedule in a V it takes a search."""


@kept
def traits(name: str) -> tuple[bool, bool]:
    """Whether a schedule of the family splits backwards, and whether its last stage is on the first rank."""
    chunks = 2 if "chunks" in schedules.options_taken(name) else 1
    program = schedules.build(name, stages=2, microbatches=4, steps=1, chunks=chunks)
    return program.split_backward, program.rank_of_stage[-1] == 0


def is_tieable(shape: Shape) -> bool:
    """Whether embedding and head can share a matrix (`model.tied`).

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    return tied_problem(_program(_alone(shape))) is None


def messages(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """The most bytes of messages that each rank holds at once.

    Args:
        shape: of the run.
        sizes: bytes of a message of each kind, in the order of `Kind`.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    # Without shards all have the same size. In units of what they have in common the count serves every size
    # of a micro-batch, and without shards every model.
    of_kind = sizes if shape.shard_head else sizes[:1] * len(sizes)
    unit = gcd(*of_kind)
    counts = _messages(_alone(shape), tuple(size // unit for size in of_kind))
    return tuple(unit * count for count in counts)


def messages_at_most(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """An upper bound of `messages`, which takes less time."""
    return tuple(sum(map(mul, counts, sizes)) for counts in _counts_at_most(shape))


@lru_cache(maxsize=4096)
def _counts_at_most(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """For each rank, an upper bound of the messages of each kind, in the order of `Kind`."""
    run, shards = represented(shape), shape.stages * shape.shard_head
    in_flight = _sends_in_flight(_alone(shape))
    counts = [dict.fromkeys(Kind, 0) for _ in range(shape.stages)]
    for sender, receiver, kind in channels_between_ranks(
        run.rank_of_stage, head_shards=shards, tied_shards=shape.tied_shards
    ):
        counts[sender][kind] += in_flight + 1
        counts[receiver][kind] += POSTED_AHEAD + 1
    blocks = run.rank_of_stage[: len(run.rank_of_stage) - shards]
    for stage, (rank, following) in enumerate(pairwise(blocks)):
        if rank == following:
            # Micro-batches that a stage has passed on, and not got back, wait on one side or the other.
            counts[rank][Kind.ACTIVATIONS] += max(wholes for wholes, _ in run.course.in_flight[stage])
    if shards:
        # Likewise between the last stage and the shard of its rank.
        last, own = len(blocks) - 1, len(blocks) + blocks[-1]
        counts[blocks[-1]][Kind.PART] += max(wholes for wholes, _ in run.course.in_flight[last])
        counts[blocks[-1]][Kind.SUMS] += max(halves for _, halves in run.course.in_flight[own])
    if shape.tied_shards:
        # Between the first stage and the shard of its rank: look-ups are as much ahead, and gradients wait
        # for no more than two actions.
        counts[blocks[0]][Kind.EMBEDDED] += EMBEDDED_AHEAD + 1
        counts[blocks[0]][Kind.OF_EMBEDDED] += EMBEDDED_AHEAD + 1
    return tuple(tuple(of_rank.values()) for of_rank in counts)


@kept
def _messages(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    program, in_flight = _program(shape), _sends_in_flight(shape)
    weights = dict(zip(Kind, sizes, strict=True))
    return tuple(
        most_messages(program, common_step=program.updates_together, in_flight=in_flight, weights=weights)
    )


@kept
def _sends_in_flight(shape: Shape) -> int:
    """Sends of a kind to one rank that may wait unacknowledged."""
    return sends_in_flight(_program(shape))


@lru_cache(maxsize=4096)
def _analysed(shape: Shape) -> tuple[int, Course]:
    program = _program(shape)
    delays = staleness(program)
    return max(delays.delay_max), course_of([program], [delays])


def _alone(shape: Shape) -> Shape:
    """As one data rank on a CPU: programs are the same for every number of them, on any device. And with as
    few micro-batches as have the same memory and delay, where nothing flushes them."""
    alone, few = shape._replace(several_data_ranks=False, on_gpu=False), _few(shape)
    return alone if few is None else alone._replace(microbatches=few[0])


def _few(shape: Shape) -> tuple[int, int] | None:
    """The least micro-batches with the memory and delay of the shape's where nothing flushes them, and in how
    many steps; None: its own."""
    options = dict(shape.options)
    member = schedules.FAMILY.get(shape.name)
    if member is None or member.synchronous or "update_interval" in options or options.get("delay", 1) > 1:
        return None
    in_a_v = member.stages_per_rank > 1
    lead = least_lead(shape.name, stages=shape.stages, shard_head=shape.shard_head, **options) or 0
    least = max(_lead(shape), lead) + (shape.stages // 2 if in_a_v else 2)
    enough = _enough(shape.stages, options.get("ahead", 1), shard_head=shape.shard_head)
    if min(shape.microbatches, enough) < least:
        return None
    # With shards of the head every second or third micro-batch may be alike.
    phase = (shape.microbatches - enough) % PERIOD if shape.shard_head else 0
    return least + (enough + phase - least) % PERIOD, 3 if in_a_v or phase else 2


STEPS_MEASURED = 12
"""Steps to average over where several are in the pipeline: long and short ones may alternate."""


class Span(NamedTuple):
    """A program, and two of its steps, numbered within it, between whose ends one is measured."""

    shape: Shape
    steps: int
    """Of the program."""
    first: int
    last: int


def steady_span(shape: Shape) -> Span:
    """What times a step of a schedule that is never flushed: the program that is analysed, with steps before
    and after, unless its own are shorter than the fill and the drain of the pipeline.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    if _few(shape):
        # The second step is the first that waits for what another has updated.
        return Span(_alone(shape), 4, 1, 2)
    ahead = dict(shape.options).get("ahead", 1)
    if shape.microbatches >= _enough(shape.stages, ahead, shard_head=shape.shard_head):
        return Span(shape, 3, 0, 1)
    fill = -(-represented(shape).fill // shape.microbatches)
    measured = STEPS_MEASURED if fill > 1 else 2
    return Span(shape, 2 * fill + 1 + measured, fill, fill + measured)


@kept
def seconds_of_step(span: Span, costs: Costs) -> float:
    """Seconds of a step, as a mean over those of the span and over the ranks, by simulation.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    if costs.transfer:
        return seconds_between(simulate(_built(span.shape, steps=span.steps), costs), span.first, span.last)
    return seconds_between_ends(_flow(span, tuple(time > 0 for time in costs.reduction)), costs)


@kept
def _flow(span: Span, reduced: tuple[bool, ...]) -> Flow:
    program = _built(span.shape, steps=span.steps)
    return flow_between(program, span.first, span.last, reduced=reduced)


def _program(shape: Shape) -> schedules.Program:
    if shape.name in schedules.FAMILY and schedules.is_synchronous(shape.name):
        return _built(shape, steps=1)
    if few := _few(shape):
        return _built(shape, steps=few[1])
    return _built(shape, steps=max(3, -(-2 * _lead(shape) // shape.microbatches) + 1))


def _lead(shape: Shape) -> int:
    """Micro-batches that enter a pipeline that is not flushed before the first comes back."""
    return int(dict(shape.options).get("ahead", 1)) * shape.stages + shape.shard_head


@lru_cache(maxsize=256)
def _built(shape: Shape, *, steps: int) -> schedules.Program:
    options = dict(shape.options)
    return schedules.build(
        shape.name,
        stages=shape.stages,
        microbatches=shape.microbatches,
        steps=steps,
        shard_head=shape.shard_head,
        tied=shape.tied_shards,
        # So many steps in, the first one reads as old a version as any.
        first_step=options.get("delay", 0),
        **options,
    )
