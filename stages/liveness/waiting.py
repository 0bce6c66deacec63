"""What a rank waits for, and the rank that all others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Waiting(NamedTuple):
    """A message that a rank waits for."""

    text: str
    """What it waits for, as a verb phrase."""
    peer: int
    """The rank that it waits for: a process of the run, counted over all pipelines."""


def awaited_rank(waits_for: Mapping[int, int]) -> int | None:
    """The one rank at the end of all chains of waiting; None if there is none, or several.

    Args:
        waits_for: by rank, the rank that it waits for.
    """
    ends = set()
    for rank in waits_for:
        passed = {rank}
        while (rank := waits_for.get(rank, rank)) not in passed:
            passed.add(rank)
        if rank in waits_for:
            return None  # they wait for each other
        ends.add(rank)
    return ends.pop() if len(ends) == 1 else None
