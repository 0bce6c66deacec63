"""The table that people read, before it is written as text, Markdown, LaTeX or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.columns import Column, columns

DISPENSABLE = (
    *(("skipped_steps", True), ("restarts", True), ("unigram_bits_per_byte", True)),
    *(("perplexity", False), ("tokens_per_second_per_rank", False)),
    *(("model", True), ("status", True), ("n", True), ("delay", True), ("peak_memory_max", True)),
    *(("unigram_bits_per_byte", False), ("skipped_steps", False), ("restarts", False)),
    *(("peak_memory_max", False), ("mfu", False), ("bits_per_byte", False), ("recovered", False)),
    ("target_tokens", False),
)
"""Columns that a narrow page can do without, first to go first, and whether only if they say the same in each
row, which is then said below it. What remains is the answer."""


@dataclass(frozen=True, kw_only=True)
class Heading:
    """Of a column: its title, which may have several lines, and whether its texts are numbers."""

    key: str
    title: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """Texts in rows and columns."""

    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    states: Sequence[str] = ()
    """The state of each row's cell; none where a row has several cells."""
    same_in_every_row: Sequence[str] = ()
    """What was taken out of the table since it was the same in all rows."""
    left_out: Sequence[str] = ()
    """Titles of columns that had no room."""
    said: str = ""
    """How to read it, where that is not plain."""

    @property
    def remarks(self) -> list[str]:
        """What stands right below the table."""
        lines = [self.said] if self.said else []
        if self.same_in_every_row:
            lines.append(f"In every row: {', '.join(self.same_in_every_row)}")
        if self.left_out:
            lines.append(f"No room here, but in the other formats: {', '.join(self.left_out)}")
        return lines

    def width(self, *, gap: int) -> int:
        """Columns of a terminal that it needs without cutting anything off."""
        widths = [
            max(map(cell_len, [*heading.title.split("\n"), *(row[place] for row in self.rows)]))
            for place, heading in enumerate(self.headings)
        ]
        return sum(widths) + gap * (len(widths) - 1)


def one_line(title: str) -> str:
    """A title on one line; words that were divided are whole again."""
    for divided, whole in (("-\n", ""), ("/\n", "/"), ("\n/", "/")):
        title = title.replace(divided, whole)
    return " ".join(title.split())


def table_of_cells(cells: Sequence[Cell], *, width: int | None, leading: Sequence[str] = ()) -> Table:
    """A row a cell.

    Args:
        cells: the rows.
        width: columns of a terminal that it should fit into, as far as the answer allows; None: any.
        leading: keys whose columns come first.
    """
    shown = columns(cells)
    shown.sort(key=lambda column: leading.index(column.key) if column.key in leading else len(leading))
    texts = {column.key: [column.text(cell) for cell in cells] for column in shown}
    same: list[str] = []
    left_out: list[str] = []
    table = _made(shown, texts, cells, same=same, left_out=left_out)
    if width is None:
        return table
    for key, only_if_constant in DISPENSABLE:
        if table.width(gap=1) <= width:
            break
        column = next((column for column in shown if column.key == key), None)
        constant = len(set(texts.get(key, ()))) == 1
        if column is None or (only_if_constant and not constant):
            continue
        title = one_line(column.title)
        if constant:
            same.append(f"{title} {texts[key][0]}")
        else:
            left_out.append(title)
        shown.remove(column)
        table = _made(shown, texts, cells, same=same, left_out=left_out)
    return table


def _made(
    shown: Sequence[Column],
    texts: dict[str, list[str]],
    cells: Sequence[Cell],
    *,
    same: Sequence[str],
    left_out: Sequence[str],
) -> Table:
    return Table(
        headings=[Heading(key=column.key, title=column.title, right=column.right) for column in shown],
        rows=[[texts[column.key][place] for column in shown] for place in range(len(cells))],
        states=[cell.state for cell in cells],
        same_in_every_row=tuple(same),
        left_out=tuple(left_out),
    )
