"""The columns that people read: title and text of each, shared by the terminal table and the Markdown one."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.report.aggregate import Cell, Spread

NOTHING = "-"


@dataclass(frozen=True)
class Column:
    title: str
    """May have several lines."""
    text: Callable[[Cell], str]
    right: bool = True
    """Numbers stand at the right."""


def columns(cells: Sequence[Cell]) -> list[Column]:
    """The named keys, further keys in which these cells differ, then the measurements."""
    axes = [Column(_two_lines(key), _axis(key), right=False) for key in (cells[0].axes if cells else ())]
    return [
        Column("schedule", lambda cell: printable(cell.schedule), right=False),
        Column("optimizer", lambda cell: printable(cell.optimizer), right=False),
        Column("EF", lambda cell: _error_feedback(cell.error_feedback), right=False),
        Column("model", lambda cell: printable(cell.model), right=False),
        *axes,
        Column("status", lambda cell: cell.state, right=False),
        Column("n", lambda cell: str(cell.n) if cell.n == len(cell.runs) else f"{cell.n}/{len(cell.runs)}"),
        Column("val loss\nnats/tok.", lambda cell: _spread(cell.val_loss, "{:.3f}")),
        Column("bits/\nbyte", lambda cell: _mean(cell.bits_per_byte, "{:.3f}")),
        Column("unigram\nb./byte", lambda cell: _number(cell.unigram_bits_per_byte, "{:.3f}")),
        Column("gap\n(delayed\n- sync)", _gap_text(cells)),
        Column("tokens\n/s", lambda cell: _mean(cell.tokens_per_second, "{:,.0f}")),
        Column("× sync", lambda cell: _number(cell.throughput_ratio, "{:.2f}")),
        Column("delay\nsteps", lambda cell: NOTHING if cell.delay is None else str(cell.delay)),
        Column("bubble\n(pred.)", _bubble_text),
    ]


def printable(text: object) -> str:
    """`text` on one line without control characters: a name cannot steer a terminal or break a row."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c)[0] == "C" else c
        for c in " ".join(str(text).split())
    )


def _two_lines(key: str) -> str:
    section, _, name = printable(key).rpartition(".")
    return f"{section}.\n{name}" if section else name


def _axis(key: str) -> Callable[[Cell], str]:
    def text(cell: Cell) -> str:
        value: Any = cell.axes[key]
        return f"{value:g}" if isinstance(value, float) else NOTHING if value is None else printable(value)

    return text


def _error_feedback(coefficient: float) -> str:
    return {0.0: "off", 1.0: "on"}.get(coefficient, f"{coefficient:g}")


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _mean(value: Spread | None, form: str) -> str:
    return NOTHING if value is None else form.format(value.mean)


def _spread(value: Spread | None, form: str) -> str:
    if value is None or value.std is None:
        return _mean(value, form)
    return f"{form.format(value.mean)}±{form.format(value.std)}"


def _gap_text(cells: Sequence[Cell]) -> Callable[[Cell], str]:
    baselines = {id(cell.baseline.runs) for cell in cells if cell.baseline is not None}

    def text(cell: Cell) -> str:
        if id(cell.runs) in baselines:
            return "baseline"
        return _number(cell.gap, "{:+.3f}")

    return text


def _bubble_text(cell: Cell) -> str:
    if cell.bubble is None:
        return NOTHING
    measured = f"{cell.bubble.mean:.0%}"
    return measured if cell.bubble_predicted is None else f"{measured} ({cell.bubble_predicted:.0%})"
