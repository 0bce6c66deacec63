"""`--rows` and `--cols`: a table with the values of configuration keys as rows and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.tables import Heading, Table, one_line
from asyncpp_cli.experiment.template import SHORTHANDS, canonical
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.tables.column import NOTHING, Column
from asyncpp_cli.report.tables.columns import key_columns, meaning, runs_text, status_text, value_columns
from asyncpp_cli.runs.settings import SettingError, check_key

ABSENT = ""
"""Text where the matrix has no such cell."""

_NUMBERS = {NOTHING: -math.inf, "off": 0.0, "on": 1.0}
"""Text that stands for a number."""

Point = tuple[str, ...]
"""Values of the row keys, or of the column keys, as text."""


def keys_of(text: str | None, *, option: str) -> list[str]:
    """The configuration keys in an option's value, separated by commas.

    Raises:
        UserError: a key is unknown, or cells are averaged over it.
    """
    keys = [key.strip() for key in (text or "").split(",") if key.strip()]
    for key in keys:
        try:
            check_key(SHORTHANDS.get(key, key))
        except SettingError as error:
            raise UserError(f"{option}: {key}: {error}") from error
        if key == "seed" or key.startswith("site."):
            raise UserError(f"{option}: {key}: cells are averaged over it; name a key that tells cells apart")
    return list(dict.fromkeys(map(canonical, keys)))


def pivot(
    cells: Sequence[CellResult], *, rows: Sequence[str], cols: Sequence[str], values: Sequence[Column]
) -> Table:
    """A table with a column for each point of the column keys, and a row for each combination of the others.

    Each entry holds the cell's values, or its state where it has none.

    Args:
        cells: of the report.
        rows: keys that lead the rows; further keys in which the cells differ follow.
        cols: keys whose values become columns.
        values: shown for each cell.
    """
    leading, points, cells_by_row = _layout(cells, rows=rows, cols=cols)
    headings = [Heading(key=column.key, title=column.title, right=False) for column in leading]
    for point in points:
        for value in values:
            value_title = [one_line(value.title)] if len(values) > 1 else []
            title = "\n".join([*_titles(cells, cols, point), *value_title])
            headings.append(Heading(key=value.key, title=title, right=True))
    lines = [
        [*label, *(text for point in points for text in _texts(row.get(point), values))]
        for label, row in cells_by_row.items()
    ]
    names = ", ".join(one_line(value.title) for value in values)
    legend = f"Each entry: {names}; in brackets the number of completed runs."
    said = meaning([text for line in lines for text in line[len(leading) :]])
    return Table(headings=headings, rows=lines, legend=f"{legend} {said}".strip())


def pivot_rows(
    cells: Sequence[CellResult], *, rows: Sequence[str], cols: Sequence[str], values: Sequence[Column]
) -> list[list[Any]]:
    """The table of `pivot` as plain values, the header first, with `n` and `status` for each cell."""
    leading, points, cells_by_row = _layout(cells, rows=rows, cols=cols)
    fields = [*values, *value_columns("n,status", cells)]
    header = [column.key for column in leading]
    for point in points:
        prefix = " ".join(_titles(cells, cols, point))
        header += [f"{prefix} {column.key}{end}" for column in fields for end in column.parts]
    lines: list[list[Any]] = [header]
    for label, row in cells_by_row.items():
        line: list[Any] = list(label)
        for point in points:
            cell = row.get(point)
            for column in fields:
                line += [
                    None if cell is None else value for value in column.record(cell or cells[0]).values()
                ]
        lines.append(line)
    return lines


def _layout(
    cells: Sequence[CellResult], *, rows: Sequence[str], cols: Sequence[str]
) -> tuple[list[Column], list[Point], dict[Point, dict[Point, CellResult]]]:
    """The leading columns, the points of the column keys, and the cells of each row by such a point."""
    by_key = {column.key: column for column in key_columns(cells)}
    chosen = cells[0].chosen if cells else ()
    further = [
        key
        for key, column in by_key.items()
        if key not in (*rows, *cols, *chosen) and len({column.text(cell) for cell in cells}) > 1
    ]
    leading = [by_key[key] for key in (*rows, *further)]
    across = [by_key[key] for key in cols]
    points = _in_order(list(dict.fromkeys(_point(cell, across) for cell in cells)))
    cells_by_row: dict[Point, dict[Point, CellResult]] = {}
    for cell in cells:
        cells_by_row.setdefault(_point(cell, leading), {})[_point(cell, across)] = cell
    return leading, points, cells_by_row


def _in_order(points: Sequence[Point]) -> list[Point]:
    """The points, sorted: numbers by size, other values in order of appearance."""
    ranks: list[dict[str, float]] = []
    for texts in zip(*points, strict=True):
        values = list(dict.fromkeys(texts))
        try:
            ranks.append({text: _NUMBERS[text] if text in _NUMBERS else float(text) for text in values})
        except ValueError:
            ranks.append({text: float(index) for index, text in enumerate(values)})
    return sorted(points, key=lambda point: [rank[text] for rank, text in zip(ranks, point, strict=True)])


def _point(cell: CellResult, columns: Sequence[Column]) -> Point:
    return tuple(column.text(cell) for column in columns)


def _titles(cells: Sequence[CellResult], keys: Sequence[str], point: Point) -> list[str]:
    """The values of a point, with the key's title where the value alone does not say what it is."""
    titles = {column.key: column.title for column in key_columns(cells)}
    plain = ("schedule", "optimizer", "model")
    return [text if key in plain else f"{titles[key]} {text}" for key, text in zip(keys, point, strict=True)]


def _texts(cell: CellResult | None, values: Sequence[Column]) -> list[str]:
    """The texts of an entry; the first also has the number of runs and the state of an unfinished cell."""
    if cell is None:
        return [ABSENT] * len(values)
    if cell.n == 0:
        return [status_text(cell)] * len(values)
    state = "" if cell.state == "completed" else f" {status_text(cell)}"
    first, *others = (value.text(cell) for value in values)
    return [f"{first} ({runs_text(cell)}{state})", *others]
