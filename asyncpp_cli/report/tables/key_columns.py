"""The columns that tell the cells of a report apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncpp_cli.base.plain_text import printable
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.names import value_text
from asyncpp_cli.report.tables.column import NOTHING, Column, Text, single


def key_columns(cells: Sequence[CellResult]) -> list[Column]:
    """Schedule, optimizer, error feedback, model, and further keys in which the cells differ.

    A setting that a cell does not use is left blank, unless cells would look alike then.
    """
    named = [
        _key("schedule", "schedule", lambda cell: printable(cell.schedule)),
        _key("optimizer", "optimizer", lambda cell: printable(cell.optimizer)),
        _key("error_feedback", "EF", lambda cell: _on_or_off(cell.error_feedback)),
        _key("model", "model", lambda cell: printable(cell.model), move_order=6),
    ]
    keys = list(cells[0].axes if cells else ())
    used = [*named, *(_axis(key, only_used=True) for key in keys)]
    if len({tuple(column.text(cell) for column in used) for cell in cells}) == len(cells):
        return used
    return [*named, *(_axis(key, only_used=False) for key in keys)]


def _key(key: str, title: str, text: Text, **options: Any) -> Column:
    return single(key, title, text=text, right=False, always=True, **options)


def _axis(key: str, *, only_used: bool) -> Column:
    def text(cell: CellResult) -> str:
        value = cell.axes[key]
        return (
            NOTHING if value is None or (only_used and not cell.uses(key)) else printable(value_text(value))
        )

    return single(key, printable(key), lambda cell: cell.axes[key], text=text, right=False)


def _on_or_off(coefficient: float) -> str:
    return {0.0: "off", 1.0: "on"}.get(coefficient, f"{coefficient:g}")
