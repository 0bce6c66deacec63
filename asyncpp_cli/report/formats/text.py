"""A report as text: on a terminal, in a file or a pipe, and as Markdown."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from asyncpp_cli.base.console import printable
from asyncpp_cli.base.tables import one_line
from asyncpp_cli.report.tables.document import Report

PLAIN_WIDTH = 120
"""Characters of a line that does not go to a terminal; more if the table needs them."""

STYLE_OF_STATE = {"completed": "green", "running": "cyan"} | dict.fromkeys(
    ("failed", "damaged", "unreadable"), "bold red"
)


def to_table(report: Report, *, console: Console) -> None:
    """Print the table, fitted to the console, the summary, problems and conditions."""
    table = report.table(width=console.width).fitted(console.width)
    console.print(Text(printable(report.name), style="bold"))
    for line in report.first_line:
        console.print(Text(printable(line)))
    console.print()
    console.print(table.text(console.width, styles=STYLE_OF_STATE), no_wrap=True, crop=False)
    for lines, style in (
        (report.summary, ""),
        ([f"! {line}" for line in report.problems], "yellow"),
        (report.conditions, "dim"),
    ):
        if lines:
            console.print()
        for line in lines:
            console.print(Text(printable(line), style=style))


def to_text(report: Report, _options: object = None) -> str:
    """The report as plain text, for files and pipes, as wide as needed."""
    width = max(PLAIN_WIDTH, report.table(width=PLAIN_WIDTH).width())
    stream = io.StringIO()
    to_table(report, console=Console(file=stream, width=width, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def to_markdown(report: Report, _options: object = None) -> str:
    """A Markdown document: heading, table, summary, problems, conditions."""
    table = report.table(width=None)
    lines = [
        f"## {escaped(report.name)}",
        "",
        *(text for line in report.first_line for text in (f"**{escaped(line)}**", "")),
        _row([one_line(heading.title) for heading in table.headings]),
        f"| {' | '.join('---:' if heading.right else '---' for heading in table.headings)} |",
        *(_row(row) for row in table.rows),
        "",
        *(f"{_sentence(line)}  " for line in table.remarks),
    ]
    lines += [f"- {_sentence(line)}" for line in report.summary]
    lines += [f"- **Note:** {_sentence(line)}" for line in report.problems]
    lines += ["", *(f"{_sentence(line)}  " for line in report.conditions)]
    return "\n".join(lines) + "\n"


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(map(escaped, texts))} |"


def _sentence(text: str) -> str:
    """A sentence escaped for Markdown, but for its commands in backticks, which are code there, too."""
    parts = re.split("(`[^`]+`)", printable(text))
    return "".join(part if place % 2 else _without_markup(part) for place, part in enumerate(parts))


def escaped(text: str) -> str:
    """`text` escaped for Markdown and the HTML in it."""
    return _without_markup(printable(text))


def _without_markup(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`*_\[\]|]", r"\\\g<0>", text)
