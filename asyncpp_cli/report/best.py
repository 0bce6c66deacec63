"""`--best-over`: of the values that were tried of a setting, each arm keeps its best."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        The cells kept, in order, and a sentence for each arm: what was tried, which value won, and whether it
        lay on the edge of what was tried (a better one may lie beyond).
    """
    arms: dict[object, list[Cell]] = {}
    for cell in cells:
        arms.setdefault(_arm(cell, keys), []).append(cell)
    kept: list[Cell] = []
    notes: list[str] = []
    names = arm_names([arm[0] for arm in arms.values()], without=keys)
    for name, arm in zip(names, arms.values(), strict=True):
        tried = [cell for cell in arm if cell.val_loss is not None and math.isfinite(cell.val_loss.mean)]
        if not tried:
            kept += arm
            notes.append(f"Best {_named(keys)} of {name}: no run of it is completed.")
            continue
        best = min(tried, key=lambda cell: cell.val_loss.mean if cell.val_loss else math.inf)
        kept.append(best)
        notes.append(_sentence(best, tried, keys, name=name, unfinished=len(arm) - len(tried)))
    return kept, notes


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


def _named(keys: Sequence[str]) -> str:
    return " and ".join(keys)


def _printed(cell: Cell, keys: Sequence[str]) -> str:
    return " and ".join(value_text(_value(cell, key)) for key in keys)


def _sentence(best: Cell, tried: Sequence[Cell], keys: Sequence[str], *, name: str, unfinished: int) -> str:
    where = f"Best {_named(keys)} of {name}: {_printed(best, keys)}"
    if len(tried) == 1:
        said = f"{where}, the only one with a completed run"
    else:
        said = f"{where}, of {', '.join(_printed(cell, keys) for cell in tried)}"
        if edges := [key for key in keys if _on_edge(best, tried, key)]:
            of_several = f" in {_named(edges)}" if len(keys) > 1 else ""
            said += f"; it lies on the edge of what was tried{of_several}: a better one may lie beyond"
    if counts := sorted({cell.n for cell in tried}):
        said += f" (n = {' or '.join(map(str, counts))})"
    if unfinished:
        said += f"; {unfinished} more without a result"
    return f"{said}."


def _on_edge(best: Cell, tried: Sequence[Cell], key: str) -> bool:
    """Whether the best value is the least or the greatest of several numbers."""
    values = {_value(cell, key) for cell in tried}
    if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
        return False
    return _value(best, key) in (min(values), max(values))
