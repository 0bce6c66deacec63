"""Short names of cells for legends and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncpp_cli.report.analysis.cells import CellResult


def arm_names(cells: Sequence[CellResult], *, without: Sequence[str] = ()) -> list[str]:
    """A name for each cell: schedule, optimizer, and the keys in which the cells differ.

    Args:
        cells: to name.
        without: keys to leave out.
    """
    left_out = {*without, "correction.name"}
    keys = [key for key in (cells[0].axes if cells else ()) if key not in left_out]
    varying = [key for key in keys if len({repr(cell.axes.get(key)) for cell in cells}) > 1]
    models = len({cell.model for cell in cells}) > 1
    return [_name(cell, varying, model=models) for cell in cells]


def _name(cell: CellResult, keys: Sequence[str], *, model: bool) -> str:
    parts = [cell.schedule, cell.optimizer]
    if cell.error_feedback:
        parts.append("EF" if cell.error_feedback == 1 else f"EF {cell.error_feedback:g}")
    if cell.correction is not None:
        parts.append(cell.correction)
    if model:
        parts.append(cell.model)
    values = {key: cell.axes.get(key) for key in keys if cell.uses(key)}
    parts += [
        f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in values.items() if value is not None
    ]
    return " ".join(parts)


def value_text(value: Any) -> str:
    """A configuration value in a few characters."""
    return f"{value:g}" if isinstance(value, float) else str(value)
