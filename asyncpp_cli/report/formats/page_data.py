"""The data of the page's charts, as JSON: arms with their runs and the thinned curves of these."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncpp_cli.report.analysis.cells import CellResult, arm_names
from asyncpp_cli.report.formats.charts import Chart, styles
from asyncpp_cli.report.formats.plotly_charts import plotly_figure
from asyncpp_cli.report.load.curves import curve, kept_indices
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.column import as_plain
from asyncpp_cli.report.tables.columns import records

MOST_CHARACTERS = 2_600_000
"""Limit of the data: with plotly's five megabytes and the tables, the page stays under eight."""

MOST_AT_FIRST = 12
"""Arms that charts show at most until others are chosen."""

_MOST_BINS = 1000
_CHARACTERS_OF_A_BIN = 70
_FEWEST_BINS = 8


def page_data(
    cells: Sequence[CellResult],
    charts: Mapping[str, Chart],
    *,
    most_characters: int = MOST_CHARACTERS,
) -> str:
    """The data as JSON, safe inside a `script` element.

    Args:
        cells: of the report.
        charts: other than the curves, by name.
        most_characters: to which curves are thinned.
    """
    figures = {name: as_plain(plotly_figure(chart)) for name, chart in charts.items()}
    runs = sum(len(cell.runs) for cell in cells)
    bins = min(_MOST_BINS, max(_FEWEST_BINS, most_characters // (_CHARACTERS_OF_A_BIN * max(runs, 1))))
    text = _encoded(cells, figures, bins)
    while len(text) > most_characters and bins > _FEWEST_BINS:
        # Nearly in proportion: evaluations and short runs are not thinned further.
        bins = max(_FEWEST_BINS, min(bins - 1, int(bins * 0.85 * most_characters / len(text))))
        text = _encoded(cells, figures, bins)
    return text


def ranks(cells: Sequence[CellResult]) -> tuple[list[int], int]:
    """The place of each cell in charts, and how many of them are shown until others are chosen.

    Of many cells the best of each arm come first, by loss, and they alone are shown. Synchronous schedules
    are one arm here: they compute the same losses. Few cells keep the table's order.
    """
    if len(cells) <= MOST_AT_FIRST:
        return list(range(len(cells))), len(cells)

    def loss(place: int) -> float:
        value = cells[place].val_loss
        return value.mean if value is not None and math.isfinite(value.mean) else math.inf

    best: dict[tuple[Any, ...], int] = {}
    ordered = sorted(range(len(cells)), key=loss)
    for place in ordered:
        cell = cells[place]
        schedule = "" if cell.synchronous else cell.schedule
        arm = (schedule, cell.optimizer, cell.error_feedback, cell.correction, cell.model)
        best.setdefault(arm, place)
    first = list(best.values())
    ordered = first + [place for place in ordered if place not in first]
    return [ordered.index(place) for place in range(len(cells))], min(MOST_AT_FIRST, len(first))


def _encoded(cells: Sequence[CellResult], figures: Mapping[str, Any], bins: int) -> str:
    places, at_first = ranks(cells)
    drawn = zip(cells, records(cells), arm_names(cells), styles(cells), places, strict=True)
    arms = [
        {
            "name": name,
            "rank": rank,
            "colour": style.colour,
            "dash": style.dash,
            "marker": style.marker,
            **{name: fields[name] for name in ("status", "n", "val_loss")},
            "runs": [_run(run, bins) for run in cell.runs],
        }
        for cell, fields, name, style, rank in drawn
    ]
    content = {
        "arms": arms,
        "atFirst": at_first,
        "charts": figures,
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # Nothing that ends the script element or begins a comment in it.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _run(run: RunResult, bins: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": run.id, "seed": run.value("seed"), "timed": not run.measurement.replayed}
    if run.steps is not None and len(run.steps):
        thinned = curve(run.steps, most_bins=bins)
        fields["train"] = {
            "step": thinned.steps.tolist(),
            "tokens": _per_step(thinned.steps.tolist(), thinned.tokens.tolist()),
            "seconds": _rounded(thinned.seconds),
            "loss": _rounded(thinned.losses),
        }
        if thinned.bin_size > 1:
            fields["mean"] = {
                "step": _rounded(thinned.mean_steps),
                "loss": _rounded(thinned.mean_losses),
                "size": thinned.bin_size,
            }
    if evaluations := run.measurement.evaluations:
        losses = np.array([one.val_loss for one in evaluations])
        kept = [evaluations[index] for index in kept_indices(losses, max(1, -(-len(losses) // bins)))]
        steps = [one.step for one in kept]
        fields["val"] = {
            "step": steps,
            "tokens": _per_step(steps, [one.tokens for one in kept]),
            "seconds": _rounded(one.seconds for one in kept),
            "loss": _rounded(one.val_loss for one in kept),
        }
    if load := _load(run, bins):
        fields["load"] = load
    return fields


def _load(run: RunResult, bins: int) -> dict[str, Any] | None:
    """The experts' load over the segments: largest over mean, of the most uneven block."""
    segments = [row for row in run.measurement.segments if row.get("experts")]
    if not segments or run.measurement.start is None:
        return None
    loads = np.array([max(row["experts"]["max_over_mean"]) for row in segments])
    kept = [(segments[index], loads[index]) for index in kept_indices(loads, max(1, -(-len(loads) // bins)))]
    return {
        "step": [row["first_step"] + row["steps"] for row, _ in kept],
        "tokens": run.measurement.start["tokens_per_step"],
        "seconds": _rounded(row["seconds"] for row, _ in kept),
        "loss": _rounded(load for _, load in kept),
    }


def _per_step(steps: Sequence[int], tokens: Sequence[int]) -> int | list[int]:
    """Tokens per step if it is constant, else the tokens at each step."""
    each = tokens[-1] // steps[-1] if steps[-1] else 0
    return each if all(step * each == count for step, count in zip(steps, tokens, strict=True)) else [*tokens]


def _rounded(values: Iterable[float]) -> list[float | None]:
    """The values with six digits, more than any useful zoom shows."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
