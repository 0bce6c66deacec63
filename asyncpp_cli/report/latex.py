"""A report as a LaTeX table (it needs the package booktabs)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.columns import NOTHING
from asyncpp_cli.report.document import Report
from asyncpp_cli.report.table import Heading

PAGE_WIDTH = 84
"""Characters that a page's width holds in small type; columns that say the same in every row go below."""

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
    # Behind the end of a row these would be read as its options.
    "[": "{[}",
    "*": "{*}",
    "\N{REPLACEMENT CHARACTER}": "?",
    "±": r"$\pm$",
    "×": r"$\times$",
}


def to_latex(report: Report) -> str:
    """A `table` environment with a caption and a label; the caption says what holds for every row.

    The answer in words, the notes and the conditions follow as comments: for the author to take from, no text
    that a paper would have to carry around.
    """
    table = report.table(width=PAGE_WIDTH)
    depth = max((len(heading.title.split("\n")) for heading in table.headings), default=1)
    caption = " ".join(f"{escaped(line).rstrip('.')}." for line in [report.name, *table.remarks])
    below = [*report.words, *report.troubles, *report.conditions]
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
    """`name` with nothing in it that a label cannot hold."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "report"


def _title_lines(headings: Sequence[Heading], depth: int) -> list[list[str]]:
    """Titles stand at the foot of their line."""
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
    """A cell's text; a minus sign is set as one."""
    if text.startswith("-") and text != NOTHING:
        return f"$-${escaped(text[1:])}"
    return "--" if text == NOTHING else escaped(text)


def escaped(text: str) -> str:
    """`text` so that LaTeX takes it as text."""
    return "".join(_SPECIAL.get(character, character) for character in printable(text))
