"""Which data-parallel rank updates which parameters of a stage. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Ownership:
    """Whole parameters, each with one owner, and their places in a flat buffer laid out by owner."""

    order: tuple[int, ...]
    """Parameters, by number, in the order in which they stand in the buffer."""
    owned: tuple[tuple[int, ...], ...]
    """For each data rank the parameters that it owns, ascending; none where there are too few."""
    bounds: tuple[int, ...]
    """Data rank d owns the entries `bounds[d] .. bounds[d + 1] - 1` of the buffer."""


def share_out(sizes: Sequence[int], *, data_ranks: int) -> Ownership:
    """Give each parameter to the data rank with the least so far, the largest first.

    Whole parameters, so that an optimizer sees whole matrices. On one data rank the order is the model's.

    Args:
        sizes: entries of each parameter.
        data_ranks: how many share them.
    """
    loads = [0] * data_ranks
    owned: list[list[int]] = [[] for _ in range(data_ranks)]
    for parameter in sorted(range(len(sizes)), key=lambda parameter: (-sizes[parameter], parameter)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[parameter]
        owned[owner].append(parameter)
    ascending = tuple(tuple(sorted(of_rank)) for of_rank in owned)
    return Ownership(
        order=tuple(parameter for of_rank in ascending for parameter in of_rank),
        owned=ascending,
        bounds=tuple(accumulate(loads, initial=0)),
    )
