"""Sharding of a stage's optimizer over its data-parallel ranks. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from math import prod
from operator import itemgetter

from stages.shape.spec import Shape, is_stack, member_count, member_shape

Run = tuple[int, int]
"""First and one past the last entry of adjacent entries in a flat buffer."""


@dataclass(frozen=True)
class Ownership:
    """The owner of each member (`stages.shape.spec`) of a stage's parameters, and the layout of its flat
    buffers: first the parameters that are no stacks, by owner, then the stacks."""

    order: tuple[int, ...]
    """Numbers of the parameters in the order of the buffer."""
    owned: tuple[tuple[int, ...], ...]
    """Numbers of the members that each data rank owns, ascending; may be none."""
    shares: tuple[tuple[int, ...], ...]
    """For each parameter, the number of its entries that each data rank owns."""
    runs: tuple[tuple[Run, ...], ...]
    """The runs of entries that each data rank owns, in the model's order."""
    parts: tuple[int, ...]
    """Number of entries that each data rank owns."""


def runs_between(runs: Sequence[Run], first: int, last: int) -> tuple[Run, ...]:
    """The entries from number `first` up to `last`, exclusive, of those in `runs`."""
    chosen = []
    for start, end in runs:
        low, high = start + max(first, 0), min(end, start + last)
        if low < high:
            chosen.append((low, high))
        first, last = first - (end - start), last - (end - start)
    return tuple(chosen)


def assign_owners(shapes: Sequence[Shape], *, data_ranks: int) -> Ownership:
    """Assign members to data ranks, the largest first, each to the rank with the fewest entries so far.

    Members are not split, so that an optimizer sees whole matrices. Each rank gets adjacent members of a
    stack, after all other parameters have been assigned. With one data rank the order is the model's, but
    for stacks.

    Args:
        shapes: of the parameters, in the model's order.
        data_ranks: number of data ranks.
    """
    sizes = [prod(shape) for shape in shapes]
    stacks = [number for number, shape in enumerate(shapes) if is_stack(shape)]
    loads = [(0, rank) for rank in range(data_ranks)]
    """A heap of the entries that each data rank has."""
    counts: list[Counter[int]] = [Counter() for _ in shapes]
    """Members of each parameter that data ranks own."""
    for parameter in sorted(
        range(len(shapes)), key=lambda number: (is_stack(shapes[number]), -sizes[number])
    ):
        size = prod(member_shape(shapes[parameter]))
        for _ in range(member_count(shapes[parameter])):
            load, owner = loads[0]
            heapreplace(loads, (load + size, owner))
            counts[parameter][owner] += 1
    wholes = [
        (min(counts[parameter]), parameter) for parameter, shape in enumerate(shapes) if not is_stack(shape)
    ]
    order = [*(parameter for _, parameter in sorted(wholes)), *stacks]
    ends = accumulate((sizes[parameter] for parameter in order), initial=0)
    starts = dict(zip(order, ends, strict=False))
    owned: list[list[int]] = [[] for _ in range(data_ranks)]
    runs: list[list[Run]] = [[] for _ in range(data_ranks)]
    member = 0
    shares = []
    for parameter, shape in enumerate(shapes):
        entry, size = starts[parameter], prod(member_shape(shape))
        shares.append(tuple(counts[parameter][rank] * size for rank in range(data_ranks)))
        for rank, count in sorted(counts[parameter].items()):
            end = entry + count * size
            owned[rank] += range(member, member + count)
            _append(runs[rank], (entry, end))
            member, entry = member + count, end
    return Ownership(
        order=tuple(order),
        owned=tuple(map(tuple, owned)),
        shares=tuple(shares),
        runs=tuple(map(tuple, runs)),
        parts=tuple(load for load, _ in sorted(loads, key=itemgetter(1))),
    )


def _append(runs: list[Run], run: Run) -> None:
    """Add a run, joined to the last one where it follows on."""
    start, end = run
    if start == end:
        return
    if runs and runs[-1][1] == start:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append(run)
