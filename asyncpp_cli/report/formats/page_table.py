"""A table as HTML, on the page and in notebooks."""

from __future__ import annotations

from html import escape

from asyncpp_cli.base.plain_text import printable
from asyncpp_cli.base.tables import Heading, Table


def html_table(table: Table) -> str:
    """The table as an HTML element, its remarks below it."""
    head = "".join(f"<th{_class(heading)}>{_title(heading)}</th>" for heading in table.headings)
    body = []
    for index, row in enumerate(table.rows):
        state = table.states[index] if table.states else ""
        cells = "".join(
            f"<td{_class(heading)}>{escaped(text)}</td>"
            for heading, text in zip(table.headings, row, strict=True)
        )
        body.append(f'<tr class="{escape(state)}">{cells}</tr>')
    remarks = "".join(f"<p>{escaped(line)}</p>" for line in table.remarks)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>{remarks}'


def _title(heading: Heading) -> str:
    # A phone may break the name of a key after its dots.
    return "<br>".join(escaped(line).replace(".", ".<wbr>") for line in heading.title.split("\n"))


def _class(heading: Heading) -> str:
    names = ["number"] * heading.right + ["more"] * heading.secondary + ["extra"] * heading.extra
    return f' class="{" ".join(names)}"' if names else ""


def escaped(text: object) -> str:
    """The text without control characters, for the content of an element."""
    return escape(printable(text))
