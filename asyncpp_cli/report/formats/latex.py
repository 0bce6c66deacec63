"""A report as a LaTeX table, for the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from asyncpp_cli.base.console import printable
from asyncpp_cli.base.tables import Heading, Table
from asyncpp_cli.report.analysis.conditions import conditions
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.tables.column import NOTHING
from asyncpp_cli.report.tables.document import Report

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


def to_latex(report: Report, options: ReportOptions) -> str:
    """A `table` environment; the table's remarks, summary, problems and conditions follow as comments."""
    caption, label = options.caption, options.label
    table = report.table(width=PAGE_WIDTH)
    remarks = replace(table, legend="").remarks
    below = [report.name, *report.first_line, *remarks, *report.summary, *report.problems, *report.conditions]
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        r"  \footnotesize\setlength{\tabcolsep}{3pt}",
        rf"  \caption{{{_caption(report, table) if caption is None else caption}}}",
        rf"  \label{{{label or f'tab:{_label(report.name)}'}}}",
        rf"  \begin{{tabular}}{{{''.join('r' if heading.right else 'l' for heading in table.headings)}}}",
        r"    \toprule",
        *(f"    {_row(line)}" for line in _title_lines(table.headings)),
        r"    \midrule",
        *(f"    {_row([_number(text) for text in row])}" for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        *(f"% {printable(line)}" for line in below),
    ]
    return "\n".join(lines) + "\n"


def _caption(report: Report, table: Table) -> str:
    """What is compared, on how many seeds, and what the gap and the intervals are."""
    cells = report.cells
    schedules, optimizers, models = (
        _listed([getattr(cell, name) for cell in cells], name) for name in ("schedule", "optimizer", "model")
    )
    keys = {heading.key for heading in table.headings}
    measured = [name for key, name in _QUANTITIES.items() if key in keys]
    subject = " and ".join(measured) or "runs"
    sentences = [f"{subject[0].upper()}{subject[1:]} of {schedules} with {optimizers}, {models}"]
    known = conditions(run for cell in cells for run in cell.runs)
    steps, tokens = known["steps"], known["tokens_per_step"]
    if len(steps) == len(tokens) == 1:
        sentences[0] += f", {steps[0]:,} steps of {tokens[0]:,} tokens"
    seeds = sorted({cell.n for cell in cells if cell.n})
    if seeds and seeds[-1] > 1:
        over = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        sentences.append(f"Mean over {over} seeds")
    if "gap" in keys:
        sentences.append("Gap: loss minus that of the synchronous counterpart, nats per token")
    if table.legend:
        sentences.append(table.legend.rstrip("."))
    return " ".join(f"{escaped(sentence)}." for sentence in sentences)


_QUANTITIES = {"val_loss": "validation loss", "tokens_per_second": "throughput"}
"""Names of columns that open a caption."""

_MOST_NAMES = 5


def _listed(names: Sequence[str], noun: str) -> str:
    """The different names, or their number if they are many."""
    different = list(dict.fromkeys(names))
    if len(different) > _MOST_NAMES:
        return f"{len(different)} {noun}s"
    *first, last = different or ["?"]
    return f"{', '.join(first)} and {last}" if first else last


def _label(name: str) -> str:
    """`name` as a label."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "report"


def _title_lines(headings: Sequence[Heading]) -> list[list[str]]:
    """The lines of the headings, aligned at the bottom."""
    titles = [heading.title.split("\n") for heading in headings]
    depth = max(map(len, titles), default=1)
    padded = [[""] * (depth - len(title)) + title for title in titles]
    return [[escaped(title[place]) for title in padded] for place in range(depth)]


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
