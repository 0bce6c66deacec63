"""The table of a report before it is written as text, Markdown, LaTeX or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.tables.column import Column
from asyncpp_cli.report.tables.columns import shown_columns


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The heading of a column."""

    key: str
    title: str
    """In one or several lines."""
    right: bool
    """Whether the column is aligned right."""
    secondary: bool = False
    """Whether a phone hides the column until it is asked to show all."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns."""

    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    states: Sequence[str] = ()
    """The state of each row's cell; empty where a row has several cells."""
    same_in_every_row: Sequence[str] = ()
    """Titles and values of columns that were moved below the table."""
    left_out: Sequence[str] = ()
    """Titles of columns without room."""
    legend: str = ""
    """How to read the table."""

    @property
    def remarks(self) -> list[str]:
        """The lines below the table."""
        lines = [self.legend] if self.legend else []
        if self.same_in_every_row:
            lines.append(f"In every row: {', '.join(self.same_in_every_row)}")
        if self.left_out:
            lines.append(f"No room here, but in the other formats: {', '.join(self.left_out)}")
        return lines

    def width(self, *, gap: int) -> int:
        """Characters of a line with `gap` blanks between the columns."""
        widths = [
            max(map(cell_len, [*heading.title.split("\n"), *(row[index] for row in self.rows)]))
            for index, heading in enumerate(self.headings)
        ]
        return sum(widths) + gap * (len(widths) - 1)


def one_line(title: str) -> str:
    """A title on one line, with hyphenated words joined."""
    for divided, whole in (("-\n", ""), ("/\n", "/"), ("\n/", "/")):
        title = title.replace(divided, whole)
    return " ".join(title.split())


def table_of_cells(cells: Sequence[CellResult], *, width: int | None, leading: Sequence[str] = ()) -> Table:
    """The table with a row for each cell.

    Args:
        cells: the rows.
        width: characters of a line to fit into, as far as the main columns allow; None: any.
        leading: keys whose columns come first.
    """
    shown = shown_columns(cells)
    shown.sort(key=lambda column: leading.index(column.key) if column.key in leading else len(leading))
    texts = {column.key: [column.text(cell) for cell in cells] for column in shown}
    same: list[str] = []
    left_out: list[str] = []
    table = _table(shown, texts, cells, same=same, left_out=left_out)
    for column, only_if_same in _by_order_of_removal(shown):
        if width is None or table.width(gap=1) <= width:
            break
        is_same = len(set(texts[column.key])) == 1
        if column not in shown or (only_if_same and not is_same):
            continue
        if is_same:
            same.append(f"{one_line(column.title)} {texts[column.key][0]}")
        else:
            left_out.append(one_line(column.title))
        shown.remove(column)
        table = _table(shown, texts, cells, same=same, left_out=left_out)
    return table


def _by_order_of_removal(shown: Sequence[Column]) -> list[tuple[Column, bool]]:
    """Columns that a narrow table can do without, and whether only if all rows have the same text."""
    steps = [(column.move_order, column, True) for column in shown]
    steps += [(column.drop_order, column, False) for column in shown]
    ordered = sorted((order, index) for index, (order, _, _) in enumerate(steps) if order is not None)
    return [steps[index][1:] for _, index in ordered]


def _table(
    shown: Sequence[Column],
    texts: dict[str, list[str]],
    cells: Sequence[CellResult],
    *,
    same: Sequence[str],
    left_out: Sequence[str],
) -> Table:
    return Table(
        headings=[_heading(column) for column in shown],
        rows=[[texts[column.key][index] for column in shown] for index in range(len(cells))],
        states=[cell.state for cell in cells],
        same_in_every_row=tuple(same),
        left_out=tuple(left_out),
    )


def _heading(column: Column) -> Heading:
    removable = column.move_order is not None or column.drop_order is not None
    return Heading(
        key=column.key,
        title=column.title,
        right=column.right,
        secondary=column.secondary or removable,
    )
