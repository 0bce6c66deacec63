"""Sharding of a stage's optimizer over its data-parallel ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Ownership:
    """The owner of each parameter, and the layout of a flat buffer ordered by owner."""

    order: tuple[int, ...]
    """Numbers of the parameters in the order of the buffer."""
    owned: tuple[tuple[int, ...], ...]
    """Numbers of the parameters that each data rank owns, ascending; may be none."""
    bounds: tuple[int, ...]
    """Data rank d owns the entries `bounds[d] .. bounds[d + 1] - 1` of the buffer."""


def share_out(sizes: Sequence[int], *, data_ranks: int) -> Ownership:
    """Assign whole parameters, the largest first, each to the data rank with the fewest entries so far.

    They are not split, so that an optimizer sees whole matrices. With one data rank the order is the model's.

    Args:
        sizes: entries of each parameter.
        data_ranks: number of data ranks.
    """
    loads = [0] * data_ranks
    owned: list[list[int]] = [[] for _ in range(data_ranks)]
    for parameter in sorted(range(len(sizes)), key=lambda parameter: (-sizes[parameter], parameter)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[parameter]
        owned[owner].append(parameter)
    ascending = tuple(tuple(sorted(parameters)) for parameters in owned)
    return Ownership(
        order=tuple(parameter for parameters in ascending for parameter in parameters),
        owned=ascending,
        bounds=tuple(accumulate(loads, initial=0)),
    )
