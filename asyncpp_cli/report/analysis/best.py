"""`--best-over`: keeps the best value of a setting for each arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.names import arm_names, value_text


def keep_best(cells: Sequence[CellResult], keys: Sequence[str]) -> tuple[list[CellResult], list[str]]:
    """Of cells that differ in `keys` alone, keep the one with the lowest mean validation loss.

    An arm without a completed cell keeps all its cells.

    Args:
        cells: not linked with each other yet.
        keys: configuration keys.

    Returns:
        The kept cells, in order, and sentences that give for each arm the values tried, the best one, and
        whether it is the smallest or largest tried.
    """
    arms: dict[object, list[CellResult]] = {}
    for cell in cells:
        arms.setdefault(_arm(cell, keys), []).append(cell)
    kept: list[CellResult] = []
    counts: list[int] = []
    best_by_values: dict[str, list[str]] = {}
    names = arm_names([arm[0] for arm in arms.values()], without=keys)
    for name, arm in zip(names, arms.values(), strict=True):
        tried = [cell for cell in arm if cell.val_loss is not None and math.isfinite(cell.val_loss.mean)]
        missing = len(arm) - len(tried)
        if not tried:
            kept += arm
            continue
        best = min(tried, key=lambda cell: cell.val_loss.mean if cell.val_loss else math.inf)
        kept.append(best)
        counts.append(best.n)
        values = ", ".join(_printed(cell, keys) for cell in tried)
        without_result = f" ({missing} more without a result)" if missing else ""
        edge = " (on the edge)" if any(_on_edge(best, tried, key) for key in keys) else ""
        entry = f"{name} {_printed(best, keys)}{edge}"
        best_by_values.setdefault(f"{values}{without_result}", []).append(entry)
    return kept, _sentences(best_by_values, " and ".join(keys), counts)


def _sentences(best_by_values: Mapping[str, Sequence[str]], keys: str, counts: Sequence[int]) -> list[str]:
    """The choices, arms with the same values tried in one sentence."""
    sentences = [
        f"Best {keys} of {values}, by mean validation loss: {'; '.join(best)}."
        for values, best in best_by_values.items()
    ]
    if any("(on the edge)" in sentence for sentence in sentences):
        sentences.append(f"On the edge of the values tried: a better {keys} may lie beyond.")
    if any(", " not in values for values in best_by_values):
        sentences.append(f"Arms with one {keys} had no choice.")
    if sentences and len(set(counts)) > 1:
        sentences.append(
            f"The chosen cells have different numbers of runs (n = {min(counts)} to {max(counts)})."
        )
    return sentences


def _arm(cell: CellResult, keys: Sequence[str]) -> object:
    """What the cells of an arm have in common."""
    left_out = {*keys, *(SHORTHANDS.get(key, key) for key in keys), "seed"}
    known = cell.runs[0].axes if cell.config is None else cell.config
    return tuple(
        sorted(
            (key, repr(value))
            for key, value in known.items()
            if key not in left_out and not key.startswith("site.")
        )
    )


def _printed(cell: CellResult, keys: Sequence[str]) -> str:
    return " and ".join(value_text(cell.value(key)) for key in keys)


def _on_edge(best: CellResult, tried: Sequence[CellResult], key: str) -> bool:
    """Whether the best value is the smallest or largest of several numbers."""
    values = {cell.value(key) for cell in tried}
    if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
        return False
    return best.value(key) in (min(values), max(values))
