"""Splitting a launch's limit on simultaneous runs among its job arrays.

SLURM throttles the tasks of one array (`--array=0-9%3`), not of several together. If there are no more arrays
than runs allowed, each array gets a share of the limit. If there are more, arrays run one task at a time in
as many lanes as runs are allowed; an array starts when the one before it in its lane has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Throttle:
    """When an array may start, and how many of its tasks may run at the same time."""

    at_once: int
    """Number of its tasks that may run at the same time."""
    after: int | None = None
    """Index of the array that must have ended first; smaller than its own."""


def throttles(sizes: Sequence[int], *, at_once: int | None) -> list[Throttle]:
    """The throttle of each array.

    Args:
        sizes: number of tasks of each array.
        at_once: number of tasks of all arrays that may run at the same time; None: no limit.
    """
    if at_once is None or at_once >= sum(sizes):
        return [Throttle(size) for size in sizes]
    if at_once >= len(sizes):
        return [Throttle(share) for share in _shares(sizes, at_once)]
    return _in_lanes(sizes, lanes=at_once)


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide `total` slots among arrays, at least one each, roughly in proportion to their sizes."""
    shares = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        most = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        shares[most] += 1
    return shares


def _in_lanes(sizes: Sequence[int], *, lanes: int) -> list[Throttle]:
    """Arrays that run one task at a time, in lanes of about the same length."""
    queues: list[list[int]] = [[] for _ in range(lanes)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        shortest = min(queues, key=lambda queue: sum(sizes[other] for other in queue))
        shortest.append(index)
    before = {later: earlier for queue in map(sorted, queues) for earlier, later in pairwise(queue)}
    return [Throttle(1, after=before.get(index)) for index in range(len(sizes))]
