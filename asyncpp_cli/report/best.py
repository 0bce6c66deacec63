"""`--best-over`: of the values that were tried of a setting, each arm keeps its best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.loaded import NAMED_KEYS
from asyncpp_cli.report.names import arm_names, value_text


def keep_best(cells: Sequence[Cell], keys: Sequence[str]) -> tuple[list[Cell], list[str]]:
    """Of the cells that differ in `keys` alone, the one with the lowest mean validation loss.

    An arm of which nothing is completed keeps all its cells: each is shown as it stands.

    Args:
        cells: not linked with each other yet.
        keys: configuration keys.

    Returns:
        The cells kept, in order, and sentences that say for each arm what was tried, which value won, and
        whether it lay on the edge of what was tried (a better one may lie beyond).
    """
    arms: dict[object, list[Cell]] = {}
    for cell in cells:
        arms.setdefault(_arm(cell, keys), []).append(cell)
    kept: list[Cell] = []
    counts: list[int] = []
    won: dict[str, list[str]] = {}
    names = arm_names([arm[0] for arm in arms.values()], without=keys)
    for name, arm in zip(names, arms.values(), strict=True):
        tried = [cell for cell in arm if cell.val_loss is not None and math.isfinite(cell.val_loss.mean)]
        without = len(arm) - len(tried)
        if not tried:
            kept += arm
            continue
        best = min(tried, key=lambda cell: cell.val_loss.mean if cell.val_loss else math.inf)
        kept.append(best)
        counts.append(best.n)
        values = ", ".join(_printed(cell, keys) for cell in tried)
        lacking = f" ({without} more without a result)" if without else ""
        edge = " (on the edge)" if any(_on_edge(best, tried, key) for key in keys) else ""
        won.setdefault(f"{values}{lacking}", []).append(f"{name} {_printed(best, keys)}{edge}")
    return kept, _sentences(won, " and ".join(keys), counts)


def _sentences(won: Mapping[str, Sequence[str]], keys: str, counts: Sequence[int]) -> list[str]:
    """What was kept, arms of which the same was tried together."""
    said = [
        f"Best {keys} of {values}, by mean validation loss: {'; '.join(winners)}."
        for values, winners in won.items()
    ]
    if any("(on the edge)" in line for line in said):
        said.append(f"On the edge of what was tried: a better {keys} may lie beyond.")
    if any(", " not in values for values in won):
        said.append(f"Where one {keys} was tried, nothing was chosen.")
    if said and len(set(counts)) > 1:
        said.append(f"The chosen cells do not have equally many runs (n = {min(counts)} to {max(counts)}).")
    return said


def _value(cell: Cell, key: str) -> Any:
    return next((run.value(key) for run in cell.runs if run.config is not None), cell.axes.get(key))


def _arm(cell: Cell, keys: Sequence[str]) -> object:
    """What the cells of an arm have in common."""
    left_out = {*keys, *(NAMED_KEYS.get(key, key) for key in keys), "seed"}
    config = next((run.config for run in cell.runs if run.config is not None), None)
    known = cell.runs[0].axes if config is None else config
    return tuple(
        sorted(
            (key, repr(value))
            for key, value in known.items()
            if key not in left_out and not key.startswith("site.")
        )
    )


def _printed(cell: Cell, keys: Sequence[str]) -> str:
    return " and ".join(value_text(_value(cell, key)) for key in keys)


def _on_edge(best: Cell, tried: Sequence[Cell], key: str) -> bool:
    """Whether the best value is the least or the greatest of several numbers."""
    values = {_value(cell, key) for cell in tried}
    if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
        return False
    return _value(best, key) in (min(values), max(values))
