"""`--rows` and `--cols`: cells laid out by configuration keys, a number of theirs in each place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.columns import NOTHING, Column, key_columns, measured_columns, runs_text, status_text
from asyncpp_cli.report.records import record
from asyncpp_cli.report.table import Heading, Table, one_line
from asyncpp_cli.settings import SettingError, check_key
from asyncpp_cli.template_file import SHORTHANDS

ABSENT = ""
"""Where the matrix has no such cell."""

_NUMBERS = {NOTHING: -math.inf, "off": 0.0, "on": 1.0}
"""Texts that stand for numbers."""

_PARTS = ("", "_std", "_low", "_high")
"""Endings of the names of a number, its spread and its interval in a record."""

_LONG_FORMS = {dotted: short for short, dotted in SHORTHANDS.items()}


def keys_of(text: str | None, *, option: str) -> list[str]:
    """The configuration keys that an option names, separated by commas.

    Raises:
        UserError: there is no such key, or it is the seed, over which cells are averaged.
    """
    keys = [key.strip() for key in (text or "").split(",") if key.strip()]
    for key in keys:
        try:
            check_key(SHORTHANDS.get(key, key))
        except SettingError as error:
            raise UserError(f"{option}: {key}: {error}") from error
        if key == "seed" or key.startswith("site."):
            raise UserError(f"{option}: {key}: cells are averaged over it; name a key that tells cells apart")
    return list(dict.fromkeys(_LONG_FORMS.get(key, key) for key in keys))


def values_of(text: str, cells: Sequence[Cell]) -> list[Column]:
    """The measured columns that `--value` names.

    Raises:
        UserError: there is no such column.
    """
    known = {column.key: column for column in measured_columns(cells)}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"--value: {name}: accepted: {', '.join(known)}")
    return [known[name] for name in names]


def pivot(
    cells: Sequence[Cell], *, rows: Sequence[str], cols: Sequence[str], values: Sequence[Column]
) -> Table:
    """A table with the column keys' values side by side, and a row for everything else that differs.

    In each place stands the cell's number, or its state where it has none.

    Args:
        cells: to lay out.
        rows: keys whose values come first in a row; further keys that the cells differ in follow.
        cols: keys whose values are side by side.
        values: what to say of each cell.
    """
    leading, points, places = _layout(cells, rows=rows, cols=cols)
    several = len(values) > 1
    headings = [Heading(key=column.key, title=column.title, right=False) for column in leading]
    for point in points:
        for value in values:
            measured = [one_line(value.title)] if several else []
            title = "\n".join([*_titles(cells, cols, point), *measured])
            headings.append(Heading(key=value.key, title=title, right=True))
    lines = [
        [*label, *(text for point in points for text in _texts(of_row.get(point), values))]
        for label, of_row in places.items()
    ]
    names = ", ".join(one_line(value.title) for value in values)
    said = f"In each place: {names}; in brackets the completed runs."
    return Table(headings=headings, rows=lines, said=said)


def pivot_rows(
    cells: Sequence[Cell], *, rows: Sequence[str], cols: Sequence[str], values: Sequence[Column]
) -> list[list[Any]]:
    """The same as plain values, the header first: for each column point the numbers of the values, and n."""
    leading, points, places = _layout(cells, rows=rows, cols=cols)
    header = [column.key for column in leading]
    known = record(cells[0]) if cells else {}
    names = [
        f"{value.key}{end}" for value in values for end in _PARTS if f"{value.key}{end}" in known or not end
    ]
    for point in points:
        where = " ".join(_titles(cells, cols, point))
        header += [f"{where} {name}" for name in names]
        header += [f"{where} n", f"{where} status"]
    lines: list[list[Any]] = [header]
    for label, of_row in places.items():
        line: list[Any] = list(label)
        for point in points:
            cell = of_row.get(point)
            fields: Mapping[str, Any] = record(cell) if cell is not None else {}
            line += [fields.get(name) for name in names]
            line += [fields.get("n"), fields.get("status")]
        lines.append(line)
    return lines


def _layout(
    cells: Sequence[Cell], *, rows: Sequence[str], cols: Sequence[str]
) -> tuple[list[Column], list[tuple[str, ...]], dict[tuple[str, ...], dict[tuple[str, ...], Cell]]]:
    """Leading columns, points of the column keys, and which cell stands where."""
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
    places: dict[tuple[str, ...], dict[tuple[str, ...], Cell]] = {}
    for cell in cells:
        places.setdefault(_point(cell, leading), {})[_point(cell, across)] = cell
    return leading, points, places


def _in_order(points: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Points of the column keys: the values of a key by size where they are numbers, else as they come."""
    places: list[dict[str, float]] = []
    for texts in zip(*points, strict=True):
        values = list(dict.fromkeys(texts))
        try:
            places.append({text: _NUMBERS[text] if text in _NUMBERS else float(text) for text in values})
        except ValueError:
            places.append({text: float(place) for place, text in enumerate(values)})
    return sorted(points, key=lambda point: [place[text] for place, text in zip(places, point, strict=True)])


def _point(cell: Cell, of_columns: Sequence[Column]) -> tuple[str, ...]:
    return tuple(column.text(cell) for column in of_columns)


def _titles(cells: Sequence[Cell], keys: Sequence[str], point: Sequence[str]) -> list[str]:
    """A point of the column keys in words: switches and numbers say which key they are of."""
    titles = {column.key: column.title.replace(chr(10), "") for column in key_columns(cells)}
    plain = ("schedule", "optimizer", "model")
    return [text if key in plain else f"{titles[key]} {text}" for key, text in zip(keys, point, strict=True)]


def _texts(cell: Cell | None, values: Sequence[Column]) -> list[str]:
    """What stands in a place for each value; behind the first, the number of runs and what they lack."""
    if cell is None:
        return [ABSENT] * len(values)
    if cell.n == 0:
        return [status_text(cell)] * len(values)
    state = "" if cell.state == "completed" else f" {status_text(cell)}"
    first, *others = (value.text(cell) for value in values)
    return [f"{first} ({runs_text(cell)}{state})", *others]
