"""Why ids are new: the settings in which new cells differ from the nearest runs of a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.runs.experiment_folder import Cell, Experiment
from asyncpp_cli.runs.settings import get, identity
from stages.config.run_config import RunConfig

_MOST_KEYS = 4
"""Keys that a line names."""


def why_new(added: Sequence[ResolvedCell], existing: Experiment) -> list[str]:
    """The keys that make ids new, a line for each set of keys; empty if no run of the folder can be read.

    Each cell is compared with the run that has the most axes in common with it.
    """
    nearest = _Nearest(existing)
    cells: Counter[tuple[str, ...]] = Counter()
    for resolved in added:
        config = nearest.config(resolved.cell)
        if config is None:
            continue
        cells[tuple(differing_keys(config, resolved.config))] += 1
    return [_line(keys, count) for keys, count in cells.items()]


def differing_keys(first: RunConfig, second: RunConfig) -> Iterator[str]:
    """The keys that make two configurations different runs."""
    of_first, of_second = identity(first), identity(second)
    for key in dict.fromkeys((*of_first, *of_second)):
        if of_first.get(key, get(first, key)) != of_second.get(key, get(second, key)):
            yield key


class _Nearest:
    """Finds the run of an experiment that has the most axes in common with a cell."""

    def __init__(self, existing: Experiment) -> None:
        self._existing = existing
        self._by_axes = {_label(cell.axes): cell for cell in existing.cells}
        self._by_all_but_one: dict[object, Cell] = {}
        for cell in existing.cells:
            for axis in cell.axes:
                self._by_all_but_one.setdefault(_label(cell.axes, without=axis), cell)
        self._configs: dict[str, RunConfig | None] = {}

    def config(self, cell: Cell) -> RunConfig | None:
        """Configuration of the nearest run; None if it cannot be read."""
        nearest = self._by_axes.get(_label(cell.axes))
        for axis in reversed(cell.axes):
            nearest = nearest or self._by_all_but_one.get(_label(cell.axes, without=axis))
        if nearest is None:
            nearest = max(self._existing.cells, key=lambda other: _in_common(cell, other), default=None)
        if nearest is None:
            return None
        if nearest.id not in self._configs:
            try:
                self._configs[nearest.id] = self._existing.run(nearest.id).config()
            except DamagedError:
                self._configs[nearest.id] = None
        return self._configs[nearest.id]


def _label(axes: Mapping[str, Any], *, without: str = "") -> object:
    return without, frozenset((key, repr(value)) for key, value in axes.items() if key != without)


def _in_common(first: Cell, second: Cell) -> int:
    return sum(second.axes.get(key) == value for key, value in first.axes.items())


def _line(keys: Sequence[str], cells: int) -> str:
    named = list(keys[:_MOST_KEYS])
    if len(keys) > _MOST_KEYS:
        named.append(f"{len(keys) - _MOST_KEYS} more")
    if any(key.endswith(".code_sha256") for key in keys):
        named.append("own code that was edited")
    differ = "1 cell differs" if cells == 1 else f"{cells} cells differ"
    return f"{differ} from the nearest run there in {', '.join(named) or 'its data'}"
