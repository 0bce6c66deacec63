"""The segment that a schedule builds a program for, and two builders.

`flushed` repeats the order of one step; every stage updates after its last backward, and nothing of a step is
left when the next begins. `unflushed` runs 1F1B through all micro-batches of the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedules.actions import NO_MICROBATCH, Action, Op, Program, ScheduleError


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of a run that a program covers: steps `first_step .. first_step + steps - 1`."""

    ranks: int
    """Pipeline ranks p."""
    microbatches: int
    """Micro-batches m a step."""
    steps: int
    first_step: int

    @property
    def first_microbatch(self) -> int:
        return self.first_step * self.microbatches

    @property
    def end_microbatch(self) -> int:
        return (self.first_step + self.steps) * self.microbatches


class Slot(NamedTuple):
    """A place in the order of one step; `microbatch` counts from 0 within the step."""

    stage: int
    op: Op
    microbatch: int


def one_forward_one_backward(*, warmup: int, count: int) -> Iterable[tuple[Op, int]]:
    """The order 1F1B of `count` micro-batches: `warmup` forwards, then one forward and one backward in turn.

    With `warmup = p - 1 - s` stage s has at most p - s micro-batches in flight (PipeDream, SOSP 2019).
    """
    warmup = min(warmup, count)
    for index in range(warmup):
        yield Op.FORWARD, index
    for index in range(warmup, count):
        yield Op.FORWARD, index
        yield Op.BACKWARD, index - warmup
    for index in range(count - warmup, count):
        yield Op.BACKWARD, index


def flushed(
    segment: Segment, *, schedule: str, rank_of_stage: Sequence[int], order: Sequence[Sequence[Slot]]
) -> Program:
    """The synchronous program that performs `order` in every step.

    Args:
        segment: To build the program for.
        schedule: The program's name.
        rank_of_stage: Which rank performs each stage's actions.
        order: For each rank, its order within one step, without updates.
    """
    return Program(
        schedule=schedule,
        microbatches=segment.microbatches,
        update_interval=segment.microbatches,
        steps=segment.steps,
        first_step=segment.first_step,
        rank_of_stage=tuple(rank_of_stage),
        initial_versions=(segment.first_step,),
        final_versions=(segment.first_step + segment.steps,),
        actions=tuple(_repeat(_with_updates(rank_order), segment) for rank_order in order),
    )


def _with_updates(rank_order: Sequence[Slot]) -> list[Slot]:
    last_backward = {
        slot.stage: place
        for place, slot in enumerate(rank_order)
        if slot.op is Op.BACKWARD or slot.op is Op.BACKWARD_WEIGHT
    }
    slots = []
    for place, slot in enumerate(rank_order):
        slots.append(slot)
        if last_backward.get(slot.stage) == place:
            slots.append(Slot(slot.stage, Op.UPDATE, 0))
    return slots


def _repeat(rank_order: list[Slot], segment: Segment) -> tuple[Action, ...]:
    update = Op.UPDATE
    actions = []
    for step in range(segment.first_step, segment.first_step + segment.steps):
        offset = step * segment.microbatches
        for stage, op, microbatch in rank_order:
            if op is update:
                actions.append(Action(stage, op, NO_MICROBATCH, step + 1))
            else:
                actions.append(Action(stage, op, microbatch + offset, step))
    return tuple(actions)


def delay_for_lead(*, lead: int, microbatches: int) -> int:
    """The smallest delay d with d m >= `lead`, at least 1."""
    return max(1, -(-lead // microbatches))


def legal_delay(segment: Segment, *, schedule: str, delay: int | None, lead: int) -> int:
    """`delay`, or the smallest legal one for None.

    Raises:
        ScheduleError: `delay` is smaller than the order allows.
    """
    smallest = delay_for_lead(lead=lead, microbatches=segment.microbatches)
    if delay is None:
        return smallest
    if delay < smallest:
        raise ScheduleError(
            f"{schedule} on {segment.ranks} ranks with {segment.microbatches} micro-batches per step needs a "
            f"delay of at least {smallest}, and {delay} is asked for"
        )
    return delay


def unflushed(
    segment: Segment,
    *,
    schedule: str,
    update_interval: int,
    updates_together: bool = True,
    stashed: bool,
    ahead: int,
    read: Callable[[int, int], int],
    initial_versions: tuple[int, ...],
    final_versions: tuple[int, ...],
) -> Program:
    """The program that runs through the segment in 1F1B order, one stage a rank, and drains at its end.

    Args:
        segment: To build the program for.
        schedule: The program's name.
        update_interval: Backwards after which a stage updates.
        updates_together: See `Program`.
        stashed: Whether a backward reads the version that its forward read; otherwise it reads the newest.
        ahead: Forwards that a stage runs ahead of its backwards, for each stage after it.
        read: The version that a forward reads, from its micro-batch and the newest version of the stage.
        initial_versions: Versions held at the start; the last is the newest.
        final_versions: Versions that must still be held at the drain.
    """
    return run_through(
        segment,
        [_one_stage(segment, stage, ahead=ahead) for stage in range(segment.ranks)],
        schedule=schedule,
        rank_of_stage=range(segment.ranks),
        update_interval=update_interval,
        updates_together=updates_together,
        stashed=stashed,
        read=read,
        initial_versions=initial_versions,
        final_versions=final_versions,
    )


def _one_stage(segment: Segment, stage: int, *, ahead: int) -> Iterator[tuple[int, Op, int]]:
    first = segment.first_microbatch
    count, warmup = segment.end_microbatch - first, ahead * (segment.ranks - 1 - stage)
    for op, index in one_forward_one_backward(warmup=warmup, count=count):
        yield stage, op, first + index


def run_through(
    segment: Segment,
    orders: Iterable[Iterable[tuple[int, Op, int]]],
    *,
    schedule: str,
    rank_of_stage: Sequence[int],
    update_interval: int,
    updates_together: bool = True,
    stashed: bool,
    read: Callable[[int, int], int],
    initial_versions: tuple[int, ...],
    final_versions: tuple[int, ...],
) -> Program:
    """The program whose ranks run through the segment without a flush; a stage updates after every
    `update_interval`-th backward, or weight half of a split one.

    Args:
        segment: To build the program for.
        orders: For each rank, its order within the segment, without updates: stage, op, and micro-batch,
            numbered through the run.
        schedule: As for `unflushed`, and so is the rest.
        rank_of_stage: Which rank performs each stage's actions.
    """
    return Program(
        schedule=schedule,
        microbatches=segment.microbatches,
        update_interval=update_interval,
        updates_together=updates_together,
        steps=segment.steps,
        first_step=segment.first_step,
        rank_of_stage=tuple(rank_of_stage),
        initial_versions=initial_versions,
        final_versions=final_versions,
        actions=tuple(
            tuple(_with_versions(order, update_interval, stashed, read, initial_versions[-1]))
            for order in orders
        ),
    )


def _with_versions(
    order: Iterable[tuple[int, Op, int]],
    interval: int,
    stashed: bool,
    read: Callable[[int, int], int],
    initial: int,
) -> Iterator[Action]:
    """The actions of an order with the versions that they read, and the updates between them."""
    forward, input_half, update = Op.FORWARD, Op.BACKWARD_INPUT, Op.UPDATE
    newest: dict[int, int] = {}
    read_by: dict[tuple[int, int], int] = {}
    for stage, op, microbatch in order:
        version = newest.setdefault(stage, initial)
        if op is forward:
            version = read_by[stage, microbatch] = read(microbatch, version)
        elif stashed:
            version = read_by[stage, microbatch]
        yield Action(stage, op, microbatch, version)
        if op is not forward and op is not input_half and (microbatch + 1) % interval == 0:
            newest[stage] += 1
            yield Action(stage, update, NO_MICROBATCH, newest[stage])
