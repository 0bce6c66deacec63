"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpp_cli.base.plain_text import printable
from asyncpp_cli.base.tables import one_line
from asyncpp_cli.report.tables.document import Report


def to_markdown(report: Report, _options: object = None) -> str:
    """A Markdown document: heading, table, summary, problems, conditions."""
    table = report.table(width=None)
    lines = [
        f"## {escaped(report.name)}",
        "",
        _row([one_line(heading.title) for heading in table.headings]),
        f"| {' | '.join('---:' if heading.right else '---' for heading in table.headings)} |",
        *(_row(row) for row in table.rows),
        "",
        *(f"{escaped(line)}  " for line in table.remarks),
    ]
    lines += [f"- {escaped(line)}" for line in report.summary]
    lines += [f"- **Note:** {escaped(line)}" for line in report.problems]
    lines += ["", *(f"{escaped(line)}  " for line in report.conditions)]
    return "\n".join(lines) + "\n"


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(map(escaped, texts))} |"


def escaped(text: str) -> str:
    """`text` escaped for Markdown and the HTML in it."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|":
        safe = safe.replace(character, f"\\{character}")
    return safe
