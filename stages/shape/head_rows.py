"""The rows of the head's matrix that each rank holds, where the head is in shards. Imports no torch.

A shard is a parameter of its own, called after its rows: `head.weight[0:500]`. Checkpoints hold them under
these names, and can be read with other shards, or with none.
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

ALIGNED = 64
"""Rows of a shard are a multiple of it where a shard has many times as many: GPUs then multiply faster."""
_MANY = 16
_ROWS = re.compile(r"\[(\d{1,9}):(\d{1,9})\]")


@lru_cache(maxsize=1024)
def shard_rows(vocabulary: int, *, row: int, others: tuple[int, ...]) -> tuple[range, ...]:
    """The rows of each rank's shard, in order, such that ranks compute about equally much; none is empty
    where there are as many rows.

    Args:
        vocabulary: rows of the whole matrix.
        row: cost of a row.
        others: of each rank, the cost of what it has besides its shard.
    """
    unit = ALIGNED if vocabulary >= _MANY * ALIGNED * len(others) else 1
    held = [1] * len(others)
    least = [(cost + unit * row, rank) for rank, cost in enumerate(others)]
    heapify(least)
    for _ in range(-(-vocabulary // unit) - len(others)):
        cost, rank = least[0]
        held[rank] += 1
        heapreplace(least, (cost + unit * row, rank))
    ends = accumulate((unit * units for units in held), initial=0)
    return tuple(range(first, min(end, vocabulary)) for first, end in pairwise(ends))


def rows_name(name: str, rows: range) -> str:
    """The name of some rows of a parameter."""
    return f"{name}[{rows.start}:{rows.stop}]"


def whole_name(name: str) -> str:
    """The parameter that a name is, or has rows of."""
    return split_name(name)[0]


def split_name(name: str) -> tuple[str, range | None]:
    """The name of the whole parameter, or the key of a tensor of it, and the rows; None: it is whole."""
    found = _ROWS.search(name)
    if found is None:
        return name, None
    return name[: found.start()] + name[found.end() :], range(int(found[1]), int(found[2]))
