"""Micro-batches in flight: a stage holds their activations, since their forward has run and their backward
has not. Imports no torch.

A split backward frees a part of them with its input half; until its weight half a micro-batch is in flight by
half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import ge
from typing import NamedTuple

from schedules import Op, Program
from schedules.actions import ADDING_NOTHING

Counts = tuple[tuple[int, int], ...]
"""Micro-batches in flight: for each stage of a rank, ascending, (whole ones, halves)."""


CHANGES: dict[Op, tuple[int, int]] = dict.fromkeys(Op, (0, 0)) | {
    Op.FORWARD: (1, 0),
    Op.BACKWARD: (-1, 0),
    Op.BACKWARD_INPUT: (-1, 1),
    Op.BACKWARD_WEIGHT: (0, -1),
    Op.HEAD: (0, 1),
    Op.HEAD_WEIGHT: (0, -1),
}
"""What an action adds to the micro-batches of its stage in flight: whole ones, halves."""


class Moment(NamedTuple):
    """An action of a rank, or an update that runs beside one, with what is in flight meanwhile."""

    op: Op
    """Forward, backward (a half counts as one) or update."""
    stage: int
    counts: Counts


def in_flight(program: Program) -> tuple[list[set[tuple[int, int]]], list[frozenset[Moment]]]:
    """For each stage, the numbers of micro-batches in flight after its actions: whole ones, and ones whose
    weight half is still to come. And for each rank, the moments at which it may hold the most; those that
    hold no more than another of the same op and stage are left out.

    A backward holds its micro-batch until it ends. An update without a gradient buffer of its own ends before
    the rank's next backward; forwards may come between.
    """
    by_stage: list[set[tuple[int, int]]] = [set() for _ in program.rank_of_stage]
    moments = []
    for rank, actions in enumerate(program.actions):
        stages = [stage for stage, holder in enumerate(program.rank_of_stage) if holder == rank]
        seen: set[tuple[Op, int, Counts]] = set()
        # A rank does much the same in every step: each change of what it holds is looked at once.
        known: list[_Holding] = [(((0, 0),) * len(stages), frozenset())]
        numbers = {known[0]: 0}
        changes: dict[tuple[int, int, Op], int] = {}
        now = 0
        for stage, op, _, _ in actions:
            key = now, stage, op
            if key not in changes:
                place = stages.index(stage)
                holding = _after(known[now], place, stage, op, seen)
                by_stage[stage].add(holding[0][place])
                changes[key] = numbers.setdefault(holding, len(known))
                known += [holding] * (len(numbers) - len(known))
            now = changes[key]
        moments.append(frozenset(_largest(Moment(*moment) for moment in seen)))
    return by_stage, moments


_Holding = tuple[Counts, frozenset[int]]
"""What a rank holds, and the stages whose updates may still run."""


def _after(holding: _Holding, place: int, stage: int, op: Op, seen: set[tuple[Op, int, Counts]]) -> _Holding:
    """What a rank holds after an action of a stage, which is its stage number `place`; adds the moments of
    the action to `seen`."""
    before, updating = holding
    if op is Op.UPDATE:
        seen.add((op, stage, before))
        return before, updating | {stage}
    (wholes, halves), (more, more_halves) = before[place], CHANGES[op]
    held = wholes + more, halves + more_halves
    counts = (*before[:place], held, *before[place + 1 :])
    if op not in ADDING_NOTHING:
        seen.add((Op.BACKWARD, stage, before))
        return counts, frozenset()
    seen.add((Op.FORWARD, stage, counts))
    seen.update((Op.UPDATE, updated, counts) for updated in updating)
    return counts, updating


def _largest(moments: Iterable[Moment]) -> Iterator[Moment]:
    """Those that hold no more of everything than another of the same op and stage."""
    kept: dict[tuple[Op, int], list[list[int]]] = {}

    def held(moment: Moment) -> list[int]:
        return [number for of_stage in moment.counts for number in of_stage]

    # Whoever holds more than a moment has a larger sum, and is itself kept or exceeded by one that is.
    for moment in sorted(moments, key=lambda moment: -sum(held(moment))):
        own, others = held(moment), kept.setdefault(moment[:2], [])
        if not any(all(map(ge, other, own)) for other in others):
            others.append(own)
            yield moment


def most_held(counts: Iterable[tuple[tuple[int, int], ...]], sizes: Sequence[tuple[int, int]]) -> int:
    """Peak bytes of the activations of some stages together.

    Args:
        counts: micro-batches in flight that occur at one time: for each stage (whole ones, halves).
        sizes: for each stage, bytes of a whole one and of a half.
    """
    return max(
        sum(
            wholes * whole + halves * half
            for (wholes, halves), (whole, half) in zip(count, sizes, strict=True)
        )
        for count in counts
    )
