"""How an arm is drawn, alike on the page and in the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.report.cells import Cell

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Hues that stay apart for readers who see few colours (Okabe and Ito, 2008); no yellow: faint on white."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Of lines, by plotly's names."""

MARKERS = ("circle", "square", "diamond", "triangle-up", "x")
"""Of points, by plotly's names; as many as dashes."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """Of an arm: a colour and, for readers who do not see it, a dash of lines and a shape of points."""

    colour: str
    dash: str
    marker: str


def styles(cells: Sequence[Cell]) -> list[Style]:
    """A style for each cell.

    Where there are few enough, what is compared has one colour (optimizer, model, further keys) and the
    schedules and corrections that are compared have dashes of their own; otherwise the styles take turns.
    """
    families = list(dict.fromkeys(_family(cell) for cell in cells))
    variants = list(dict.fromkeys(_variant(cell) for cell in cells))
    if len(families) > 1 and len(families) <= len(HUES) and len(variants) <= len(DASHES):
        return [_style(families.index(_family(cell)), variants.index(_variant(cell))) for cell in cells]
    return [_style(place % len(HUES), place // len(HUES) % len(DASHES)) for place in range(len(cells))]


def _style(hue: int, dash: int) -> Style:
    return Style(colour=HUES[hue], dash=DASHES[dash], marker=MARKERS[dash])


def _family(cell: Cell) -> tuple[str, ...]:
    further = (
        f"{key}={value!r}"
        for key, value in cell.axes.items()
        if not key.startswith("correction.") and key not in cell.chosen
    )
    return (cell.optimizer, cell.model, *further)


def _variant(cell: Cell) -> tuple[str, ...]:
    corrections = (f"{key}={value!r}" for key, value in cell.axes.items() if key.startswith("correction."))
    return (cell.schedule, f"{cell.error_feedback!r}", *corrections)
