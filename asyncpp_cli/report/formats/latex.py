"""A report as a LaTeX table, for the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.tables.column import NOTHING
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.tables import Heading

PAGE_WIDTH = 84
"""Characters of a line in small type; a wider table has columns removed."""

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # After the end of a row these would be read as its options.
    "[": "{[}",
    "*": "{*}",
    "\N{REPLACEMENT CHARACTER}": "?",
    "±": r"$\pm$",
    "×": r"$\times$",
}


def to_latex(report: Report) -> str:
    """A `table` environment with caption and label. Summary, problems and conditions follow as comments."""
    table = report.table(width=PAGE_WIDTH)
    depth = max((len(heading.title.split("\n")) for heading in table.headings), default=1)
    caption = " ".join(f"{escaped(line).rstrip('.')}." for line in [report.name, *table.remarks])
    below = [*report.summary, *report.problems, *report.conditions]
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        r"  \footnotesize\setlength{\tabcolsep}{3pt}",
        rf"  \caption{{{caption}}}",
        rf"  \label{{tab:{_label(report.name)}}}",
        rf"  \begin{{tabular}}{{{''.join('r' if heading.right else 'l' for heading in table.headings)}}}",
        r"    \toprule",
        *(f"    {_row(line)}" for line in _title_lines(table.headings, depth)),
        r"    \midrule",
        *(f"    {_row([_number(text) for text in row])}" for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        *(f"% {escaped(line)}" for line in below),
    ]
    return "\n".join(lines) + "\n"


def _label(name: str) -> str:
    """`name` as a label."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "report"


def _title_lines(headings: Sequence[Heading], depth: int) -> list[list[str]]:
    """The lines of the headings, aligned at the bottom."""
    titles = [heading.title.split("\n") for heading in headings]
    return [
        [
            escaped(title[place - depth + len(title)]) if place >= depth - len(title) else ""
            for title in titles
        ]
        for place in range(depth)
    ]


def _row(texts: Sequence[str]) -> str:
    return rf"{' & '.join(texts)} \\"


def _number(text: str) -> str:
    """The text with a typeset minus sign."""
    if text.startswith("-") and text != NOTHING:
        return f"$-${escaped(text[1:])}"
    return "--" if text == NOTHING else escaped(text)


def escaped(text: str) -> str:
    """`text` escaped for LaTeX."""
    return "".join(_SPECIAL.get(character, character) for character in printable(text))
