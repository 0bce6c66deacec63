"""Micro-batches in flight in a stage. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schedules import Op, Program


def in_flight_counts(program: Program) -> list[set[tuple[int, int]]]:
    """For each stage, the numbers of micro-batches in flight after its actions: whole ones, and ones whose
    weight half is still to come."""
    counts = []
    for actions in program.actions_by_stage():
        wholes = halves = 0
        seen = set()
        for action in actions:
            wholes, halves = after(action.op, wholes, halves)
            seen.add((wholes, halves))
        counts.append(seen)
    return counts


def after(op: Op, wholes: int, halves: int) -> tuple[int, int]:
    """The numbers in flight after an action."""
    if op is Op.FORWARD:
        return wholes + 1, halves
    if op is Op.BACKWARD:
        return wholes - 1, halves
    if op is Op.BACKWARD_INPUT:
        return wholes - 1, halves + 1
    if op is Op.BACKWARD_WEIGHT:
        return wholes, halves - 1
    return wholes, halves


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
