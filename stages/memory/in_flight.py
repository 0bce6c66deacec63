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
    forward, backward, update = Op.FORWARD, Op.BACKWARD, Op.UPDATE
    by_stage: list[set[tuple[int, int]]] = [set() for _ in program.rank_of_stage]
    moments = []
    for rank, actions in enumerate(program.actions):
        now = {stage: (0, 0) for stage, holder in enumerate(program.rank_of_stage) if holder == rank}
        seen: set[tuple[Op, int, Counts]] = set()
        updating: set[int] = set()
        before = tuple(now.values())
        for stage, op, _, _ in actions:
            if op is update:
                updating.add(stage)
                seen.add((update, stage, before))
                by_stage[stage].add(now[stage])
                continue
            (wholes, halves), (more, more_halves) = now[stage], CHANGES[op]
            now[stage] = held = wholes + more, halves + more_halves
            by_stage[stage].add(held)
            counts = tuple(now.values())
            if op in ADDING_NOTHING:
                seen.add((forward, stage, counts))
                for updated in updating:
                    seen.add((update, updated, counts))
            else:
                updating.clear()
                seen.add((backward, stage, before))
            before = counts
        moments.append(frozenset(_largest(Moment(*moment) for moment in seen)))
    return by_stage, moments


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
