"""Short names of cells, as legends and sentences need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncpp_cli.report.cells import Cell


def arm_names(cells: Sequence[Cell], *, without: Sequence[str] = ()) -> list[str]:
    """A name for each cell that says in what it differs from the others, and its schedule and optimizer.

    Args:
        cells: to be told from each other.
        without: keys that are left out of the names.
    """
    own = {*without, "correction.name"}
    keys = [key for key in (cells[0].axes if cells else ()) if key not in own]
    varying = [key for key in keys if len({repr(cell.axes.get(key)) for cell in cells}) > 1]
    models = len({cell.model for cell in cells}) > 1
    return [_name(cell, varying, model=models) for cell in cells]


def _name(cell: Cell, keys: Sequence[str], *, model: bool) -> str:
    parts = [cell.schedule, cell.optimizer]
    if cell.error_feedback:
        parts.append("EF" if cell.error_feedback == 1 else f"EF {cell.error_feedback:g}")
    if cell.correction is not None:
        parts.append(cell.correction)
    if model:
        parts.append(cell.model)
    parts += [f"{key.rpartition('.')[2]} {value_text(cell.axes.get(key))}" for key in keys if cell.uses(key)]
    return " ".join(parts)


def value_text(value: Any) -> str:
    """A configuration value in a few characters."""
    return f"{value:g}" if isinstance(value, float) else str(value)
