"""A report as text, on a terminal or elsewhere."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.report.tables.table import Table

PLAIN_WIDTH = 120
"""Characters of a line that does not go to a terminal; more if the table needs them."""

STYLE_OF_STATE = {"completed": "green", "running": "cyan", "failed": "bold red", "damaged": "bold red"}


def to_table(report: Report, *, console: Console) -> None:
    """Print the table, the summary, problems and conditions.

    On a narrow console, columns that are the same in every row become a line below the table, and the least
    important others are left out.
    """
    table = report.table(width=console.width)
    gap = 2 if table.width(gap=2) <= console.width else 1
    console.print(Text(printable(report.name), style="bold"))
    console.print()
    console.print(_rich_table(table, gap=gap), crop=False)
    for line in table.remarks:
        console.print(Text(printable(line)))
    for lines, style in (
        (report.summary, ""),
        ([f"! {line}" for line in report.problems], "yellow"),
        (report.conditions, "dim"),
    ):
        if lines:
            console.print()
        for line in lines:
            console.print(Text(printable(line), style=style))


def _rich_table(table: Table, *, gap: int) -> RichTable:
    # With its full width set, the terminal wraps a table that is too wide; rich would cut it off.
    width = table.width(gap=gap)
    rich_table = RichTable(
        box=SIMPLE_HEAD, width=width, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0)
    )
    for heading in table.headings:
        rich_table.add_column(Text(heading.title), justify="right" if heading.right else "left", no_wrap=True)
    for place, row in enumerate(table.rows):
        style = STYLE_OF_STATE.get(table.states[place], "") if table.states else ""
        rich_table.add_row(
            *(
                Text(text, style if heading.key == "status" else "")
                for heading, text in zip(table.headings, row, strict=True)
            )
        )
    return rich_table


def to_text(report: Report) -> str:
    """The report as plain text, for files and pipes, as wide as needed."""
    width = max(PLAIN_WIDTH, report.table(width=PLAIN_WIDTH).width(gap=1))
    stream = io.StringIO()
    to_table(report, console=Console(file=stream, width=width, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())
