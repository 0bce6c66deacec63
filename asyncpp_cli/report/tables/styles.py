"""Colours, dashes and markers of arms, the same on the page and in the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.report.analysis.cells import CellResult

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Hues for colour-blind readers (Okabe and Ito, 2008), without yellow, which is faint on white."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""plotly's names."""

MARKERS = ("circle", "square", "diamond", "triangle-up", "x")
"""plotly's names; as many as dashes."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The look of an arm; the dash and marker serve readers who do not see the colour."""

    colour: str
    dash: str
    marker: str


def styles(cells: Sequence[CellResult]) -> list[Style]:
    """A style for each cell.

    If there are few enough, the colour stands for optimizer, model and further keys, and the dash for
    schedule and correction; otherwise all styles are used in turn.
    """
    families = list(dict.fromkeys(_family(cell) for cell in cells))
    variants = list(dict.fromkeys(_variant(cell) for cell in cells))
    if len(families) > 1 and len(families) <= len(HUES) and len(variants) <= len(DASHES):
        return [_style(families.index(_family(cell)), variants.index(_variant(cell))) for cell in cells]
    return [_style(index % len(HUES), index // len(HUES) % len(DASHES)) for index in range(len(cells))]


def _style(hue: int, dash: int) -> Style:
    return Style(colour=HUES[hue], dash=DASHES[dash], marker=MARKERS[dash])


def _family(cell: CellResult) -> tuple[str, ...]:
    further = (
        f"{key}={value!r}"
        for key, value in cell.axes.items()
        if not key.startswith("correction.") and key not in cell.chosen
    )
    return (cell.optimizer, cell.model, *further)


def _variant(cell: CellResult) -> tuple[str, ...]:
    corrections = (f"{key}={value!r}" for key, value in cell.axes.items() if key.startswith("correction."))
    return (cell.schedule, f"{cell.error_feedback!r}", *corrections)
