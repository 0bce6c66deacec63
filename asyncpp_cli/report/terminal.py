"""A report as a table in a terminal, or as plain text of the same form."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.document import Report
from asyncpp_cli.report.table import Table

PLAIN_WIDTH = 120
"""Columns of a report that is not written to a terminal; more if the table needs them."""

STYLE_OF_STATE = {"completed": "green", "running": "cyan", "failed": "bold red", "damaged": "bold red"}


def to_table(report: Report, *, console: Console) -> None:
    """Prints the report for people: the table, the answer in words, what went wrong, and the conditions.

    Where the console is too narrow, columns that say the same in every row become a line under the table, and
    the least needed of the others are left out.
    """
    table = report.table(width=console.width)
    gap = 2 if table.width(gap=2) <= console.width else 1
    console.print(Text(printable(report.name), style="bold"))
    console.print()
    console.print(_drawn(table, gap=gap), crop=False)
    for line in table.remarks:
        console.print(Text(printable(line)))
    for lines, style in (
        (report.words, ""),
        ([f"! {line}" for line in report.troubles], "yellow"),
        (report.conditions, "dim"),
    ):
        if lines:
            console.print()
        for line in lines:
            console.print(Text(printable(line), style=style))


def _drawn(table: Table, *, gap: int) -> RichTable:
    # With a width of its own a table too wide for the terminal is wrapped by that, not cut off by rich.
    width = table.width(gap=gap)
    drawn = RichTable(
        box=SIMPLE_HEAD, width=width, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0)
    )
    for heading in table.headings:
        drawn.add_column(Text(heading.title), justify="right" if heading.right else "left", no_wrap=True)
    for place, row in enumerate(table.rows):
        style = STYLE_OF_STATE.get(table.states[place], "") if table.states else ""
        drawn.add_row(
            *(
                Text(text, style if heading.key == "status" else "")
                for heading, text in zip(table.headings, row, strict=True)
            )
        )
    return drawn


def to_text(report: Report) -> str:
    """The terminal's table as plain text, for files and pipes: as wide as it must be."""
    width = max(PLAIN_WIDTH, report.table(width=PLAIN_WIDTH).width(gap=1))
    stream = io.StringIO()
    to_table(report, console=Console(file=stream, width=width, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())
