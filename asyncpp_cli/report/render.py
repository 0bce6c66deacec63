"""Writes a report as a terminal table, as Markdown, as CSV or as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncpp_cli.report.aggregate import Cell, Spread
from asyncpp_cli.report.columns import Column, columns, printable
from asyncpp_cli.report.conditions import asyncpp_version, conditions, conditions_lines
from asyncpp_cli.report.words import in_words

PLAIN_WIDTH = 120
"""Columns of a report that is not written to a terminal; more if the table needs them."""

SPARE_TITLES = ("model", "status", "n", "unigram\nb./byte", "delay\nsteps")
"""Columns that a narrow terminal can do without if they say the same in every row, first to go first."""

STYLE_OF_STATE = {"completed": "green", "running": "cyan", "failed": "bold red", "unreadable": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """An experiment's cells and what belongs under them."""

    name: str
    cells: Sequence[Cell]
    notes: Sequence[str]
    """What a reader must know about the files or the averaging."""


def to_table(report: Report, *, console: Console) -> None:
    """Prints the report for people: the table, the answer in words, what went wrong, and the conditions.

    Where the console is too narrow, columns that say the same in every row become a line under the table.
    """
    shown, same_in_every_row, gap = _fitting(report.cells, width=console.width)
    # With a width of its own a table too wide for the terminal is wrapped by that, not cut off by rich.
    width = _width(shown, report.cells, gap=gap)
    table = Table(box=SIMPLE_HEAD, width=width, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for column in shown:
        table.add_column(Text(column.title), justify="right" if column.right else "left", no_wrap=True)
    for cell in report.cells:
        style = STYLE_OF_STATE.get(cell.state, "")
        table.add_row(
            *(Text(column.text(cell), style if column.title == "status" else "") for column in shown)
        )
    console.print(Text(printable(report.name), style="bold"))
    console.print()
    console.print(table, crop=False)
    if same_in_every_row:
        console.print(Text(f"In every row: {', '.join(same_in_every_row)}"))
    troubles = [*_reasons(report.cells), *report.notes]
    for lines, style in (
        (in_words(report.cells), ""),
        ([f"! {line}" for line in troubles], "yellow"),
        (conditions_lines(report.cells), "dim"),
    ):
        if lines:
            console.print()
        for line in lines:
            console.print(Text(printable(line), style=style))


def _fitting(cells: Sequence[Cell], *, width: int) -> tuple[list[Column], list[str], int]:
    """Columns for a table of that width, the constants left out of it, and the spaces between columns."""
    shown = columns(cells)
    same_in_every_row = []
    for title in SPARE_TITLES:
        if _width(shown, cells, gap=1) <= width:
            break
        column = next(column for column in shown if column.title == title)
        texts = {column.text(cell) for cell in cells}
        if len(texts) == 1:
            shown.remove(column)
            same_in_every_row.append(f"{' '.join(title.split())} {texts.pop()}")
    return shown, same_in_every_row, 2 if _width(shown, cells, gap=2) <= width else 1


def _width(shown: Sequence[Column], cells: Sequence[Cell], *, gap: int) -> int:
    """Columns of the terminal that a table needs without cutting anything off."""
    texts = [[*column.title.split("\n"), *(column.text(cell) for cell in cells)] for column in shown]
    return sum(max(map(cell_len, column)) for column in texts) + gap * (len(shown) - 1)


def to_text(report: Report) -> str:
    """The terminal's table as plain text, for files and pipes: as wide as it must be."""
    width = max(PLAIN_WIDTH, _width(columns(report.cells), report.cells, gap=1))
    stream = io.StringIO()
    to_table(report, console=Console(file=stream, width=width, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def to_markdown(report: Report) -> str:
    """A Markdown document: heading, table, the answer in words, what went wrong, conditions."""
    shown = columns(report.cells)
    lines = [
        f"## {_markdown(report.name)}",
        "",
        _markdown_row([column.title.replace("\n", " ") for column in shown]),
        _markdown_row(["---:" if column.right else "---" for column in shown], escape=False),
        *(_markdown_row([column.text(cell) for column in shown]) for cell in report.cells),
        "",
    ]
    lines += [f"- {_markdown(line)}" for line in in_words(report.cells)]
    lines += [f"- **Note:** {_markdown(line)}" for line in (*_reasons(report.cells), *report.notes)]
    lines += ["", *(f"{_markdown(line)}  " for line in conditions_lines(report.cells))]
    return "\n".join(lines) + "\n"


def _markdown_row(texts: Sequence[str], *, escape: bool = True) -> str:
    return f"| {' | '.join(_markdown(text) if escape else text for text in texts)} |"


def _markdown(text: str) -> str:
    """`text` so that Markdown and the HTML within it take it as text."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped


def _reasons(cells: Sequence[Cell]) -> list[str]:
    return [reason for cell in cells for reason in cell.reasons]


def _record(cell: Cell) -> dict[str, Any]:
    """A cell's numbers as they are; None where there is none (and for a loss that is not finite)."""
    coefficient = cell.error_feedback
    record: dict[str, Any] = {
        "schedule": cell.schedule,
        "optimizer": cell.optimizer,
        "error_feedback": bool(coefficient) if coefficient in (0.0, 1.0) else coefficient,
        "model": cell.model,
        **cell.axes,
        "status": cell.state,
        "reason": "; ".join(cell.reasons) or None,
        "n": cell.n,
    }
    record |= _spread("val_loss", cell.val_loss)
    record |= _spread("bits_per_byte", cell.bits_per_byte)
    record["unigram_bits_per_byte"] = cell.unigram_bits_per_byte
    record["gap"] = cell.gap
    record["baseline"] = cell.baseline.schedule if cell.baseline is not None else None
    record |= _spread("tokens_per_second", cell.tokens_per_second)
    record["throughput_ratio"] = cell.throughput_ratio
    record["delay"] = cell.delay
    record |= _spread("bubble", cell.bubble)
    record["bubble_predicted"] = cell.bubble_predicted
    record["runs"] = [run.id for run in cell.runs]
    record["conditions"] = _conditions(cell)
    return {key: _finite(value) for key, value in record.items()}


def _spread(name: str, value: Spread | None) -> dict[str, float | None]:
    return {name: value.mean if value else None, f"{name}_std": value.std if value else None}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(report: Report) -> str:
    """A list of cells; with each, the ids of its runs and the conditions that they ran under."""
    return json.dumps([_record(cell) for cell in report.cells], indent=2, allow_nan=False) + "\n"


def _conditions(cell: Cell) -> dict[str, Any]:
    """Each condition's value; a list where the cell's runs differ, None where it is unknown."""
    found = conditions(cell.runs)
    return {"asyncpp": asyncpp_version()} | {
        name: values[0] if len(values) == 1 else values or None for name, values in found.items()
    }


def to_csv(report: Report) -> str:
    """The same as the JSON, a line a cell: conditions in the last columns, an empty field for nothing."""
    rows = []
    for cell in report.cells:
        record = _record(cell)
        record |= record.pop("conditions")
        rows.append({name: _joined(value) for name, value in record.items()})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else ["schedule"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _joined(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value
