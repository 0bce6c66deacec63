"""Tables for narrow terminals: a row stays one line; columns are moved above the table or left out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

_GAP = 2
_SHORTEST = 24
"""Least number of characters to keep of the first column."""


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """How to narrow a table that is too wide."""

    optional: Sequence[str] = ()
    """Columns to leave out, in this order, until the others fit."""
    shared: Collection[str] = ()
    """Columns to move above the table if all rows have the same value."""
    beneath: str | None = None
    """Column printed after each row if there is room, else on the next line."""


def ruled_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Width of a table with rules between its columns and no folded cell."""
    return sum(width + 3 for width in _widths(columns, rows)) + 1


def compact(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    title: str,
    narrow: Narrow,
) -> str:
    """A table without rules, no wider than `width`.

    Args:
        columns: headings; they are wrapped at spaces and underscores.
        rows: one text for each column. The first, an id, is shortened in the middle if nothing else helps.
        width: characters on a line.
        title: printed above the table.
        narrow: what may be left out or moved.
    """
    table = [list(columns), *(list(row) for row in rows)]
    notes = _take(table, narrow.beneath) if narrow.beneath in columns else [""] * len(rows)
    for column in columns:
        # A column that is empty in every row.
        if column in table[0] and not any(row[table[0].index(column)] for row in table[1:]):
            _take(table, column)
    shared_values = []
    if len(rows) > 1:
        for column in [column for column in table[0] if column in narrow.shared]:
            if len({row[table[0].index(column)] for row in table[1:]}) == 1:
                shared_values.append(f"{column} {_take(table, column)[0]}")
    for column in narrow.optional:
        if _width(table) <= width:
            break
        if column in table[0]:
            _take(table, column)
    if (excess := _width(table) - width) > 0:
        widest = max(_SHORTEST, max(len(row[0]) for row in table) - excess)
        for row in table[1:]:
            row[0] = shortened(row[0], widest)
    lines = textwrap.wrap(title, width) or [""]
    lines += textwrap.wrap(f"in all: {', '.join(shared_values)}", width) if shared_values else []
    widths = _widths([_broken(heading) for heading in table[0]], table[1:])
    heads = [_joined(_broken(heading), width) for heading, width in zip(table[0], widths, strict=True)]
    tallest = max(len(head) for head in heads)
    for index in range(tallest):
        # Headings are aligned at the bottom.
        cells = [head[index - tallest + len(head)] if index >= tallest - len(head) else "" for head in heads]
        lines.append(_line(cells, widths))
    note_width = width - sum(widths) - _GAP * len(widths)
    for row, note in zip(table[1:], notes, strict=True):
        if len(note) <= note_width:
            lines.append(_line([*row, note], [*widths, 0]))
            continue
        lines.append(_line(row, widths))
        lines += textwrap.wrap(note, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def shortened(text: str, length: int) -> str:
    """A text shortened in the middle; its end distinguishes ids that begin alike."""
    if len(text) <= length:
        return text
    end = (length - 1) // 2
    return f"{text[: length - 1 - end]}…{text[len(text) - end :]}"


def _take(table: list[list[str]], column: str | None) -> list[str]:
    """Remove a column from a table; returns its texts."""
    index = table[0].index(str(column))
    _, *texts = [row.pop(index) for row in table]
    return texts


def _broken(heading: str) -> list[str]:
    return [part for part in re.split(r"(?<=_)|(?<=\.)| ", heading) if part] or [""]


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """The parts of a heading on as few lines as possible."""
    lines = [parts[0]]
    for part in parts[1:]:
        gap = "" if lines[-1].endswith(("_", ".")) else " "
        if len(lines[-1]) + len(gap) + len(part) <= width:
            lines[-1] += gap + part
        else:
            lines.append(part)
    return lines


def _width(table: Sequence[Sequence[str]]) -> int:
    widths = _widths([_broken(heading) for heading in table[0]], table[1:])
    return sum(widths) + _GAP * (len(widths) - 1)


def _widths(headings: Sequence[str | Sequence[str]], rows: Sequence[Sequence[str]]) -> list[int]:
    heads = [[heading] if isinstance(heading, str) else heading for heading in headings]
    return [
        max(*(len(part) for part in head), *(len(row[index]) for row in rows), 0)
        for index, head in enumerate(heads)
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return (" " * _GAP).join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def printed(axis: str, value: Any) -> str:
    """A value of an axis, for display."""
    if axis == "error_feedback":
        return f"{value:g}" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
