"""How many runs of each array may go on at once, so that those of a launch together are as many as was said.

SLURM bounds the tasks of one array (`--array=0-9%3`), never those of several. Where there are at most as many
arrays as runs may go on, each gets a share, and the shares add up. Where there are more, they queue up in
lanes, as many as runs may go on: an array begins when the one before it in its lane has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Turn:
    """When an array may run, and how much of it."""

    at_once: int
    """Tasks of it that may run together."""
    after: int | None = None
    """The array that must have ended, by its place among the launch's; it comes before this one."""


def turns(sizes: Sequence[int], *, at_once: int | None) -> list[Turn]:
    """The turn of each array.

    Args:
        sizes: tasks of each array.
        at_once: tasks that may run together, of all arrays; None: any number.
    """
    if at_once is None or at_once >= sum(sizes):
        return [Turn(size) for size in sizes]
    if at_once >= len(sizes):
        return [Turn(share) for share in _shares(sizes, at_once)]
    return _queued_up(sizes, lanes=at_once)


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """`total` places for arrays, at least one each, so that all take about as many rounds."""
    shares = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        most = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        shares[most] += 1
    return shares


def _queued_up(sizes: Sequence[int], *, lanes: int) -> list[Turn]:
    """Each array one run at a time, in lanes of about the same length."""
    queues: list[list[int]] = [[] for _ in range(lanes)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        shortest = min(queues, key=lambda queue: sum(sizes[other] for other in queue))
        shortest.append(index)
    before = {later: earlier for queue in map(sorted, queues) for earlier, later in pairwise(queue)}
    return [Turn(1, after=before.get(index)) for index in range(len(sizes))]
