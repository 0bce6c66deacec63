"""What the page's script draws, as JSON: arms, their runs, and the runs' curves in few points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.curves import curve, kept_places
from asyncpp_cli.report.loaded import Run
from asyncpp_cli.report.names import arm_names
from asyncpp_cli.report.records import finite
from asyncpp_cli.report.styles import styles

MOST_CHARACTERS = 2_600_000
"""Of the curves together: with plotly's five megabytes and the tables, the page stays under eight."""

_MOST_BINS = 1000
_CHARACTERS_OF_A_BIN = 70
_FEWEST_BINS = 8


def page_data(cells: Sequence[Cell], *, most_characters: int = MOST_CHARACTERS) -> str:
    """The data as JSON, to stand inside of a `script` element."""
    runs = sum(len(cell.runs) for cell in cells)
    bins = min(_MOST_BINS, max(_FEWEST_BINS, most_characters // (_CHARACTERS_OF_A_BIN * max(runs, 1))))
    text = _encoded(cells, bins)
    while len(text) > most_characters and bins > _FEWEST_BINS:
        # Nearly in proportion: what is not thinned stays.
        bins = max(_FEWEST_BINS, min(bins - 1, int(bins * 0.85 * most_characters / len(text))))
        text = _encoded(cells, bins)
    return text


def _encoded(cells: Sequence[Cell], bins: int) -> str:
    drawn = zip(cells, arm_names(cells), styles(cells), strict=True)
    arms = [
        {
            "name": name,
            "colour": style.colour,
            "dash": style.dash,
            "marker": style.marker,
            **finite(_numbers(cell)),
            "runs": [_run(run, bins) for run in cell.runs],
        }
        for cell, name, style in drawn
    ]
    text = json.dumps({"arms": arms}, separators=(",", ":"), allow_nan=False)
    # Neither an end of the script element nor the beginning of a comment in it.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _numbers(cell: Cell) -> dict[str, Any]:
    """Of the bars: the same numbers as in the table, unrounded."""
    interval = cell.gap_interval
    speed = cell.tokens_per_second
    return {
        "state": cell.state,
        "n": cell.n,
        "loss": cell.val_loss.mean if cell.val_loss is not None else None,
        "gap": cell.gap,
        "gapLow": interval.low if interval is not None else None,
        "gapHigh": interval.high if interval is not None else None,
        "gaps": cell.gap_pairs.differences if cell.gap_pairs is not None else [],
        "speed": speed.mean if speed is not None else None,
        "speedStd": speed.std if speed is not None else None,
        "ratio": cell.throughput_ratio,
        "busy": cell.busy_by_rank,
        "memory": cell.peak_memory,
    }


def _run(run: Run, bins: int) -> dict[str, Any]:
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
        kept = [evaluations[place] for place in kept_places(losses, max(1, -(-len(losses) // bins)))]
        steps = [one.step for one in kept]
        fields["val"] = {
            "step": steps,
            "tokens": _per_step(steps, [one.tokens for one in kept]),
            "seconds": _rounded(one.seconds for one in kept),
            "loss": _rounded(one.val_loss for one in kept),
        }
    return fields


def _per_step(steps: Sequence[int], tokens: Sequence[int]) -> int | list[int]:
    """Tokens a step where it is the same all along, else the tokens."""
    each = tokens[-1] // steps[-1] if steps[-1] else 0
    return each if all(step * each == count for step, count in zip(steps, tokens, strict=True)) else [*tokens]


def _rounded(values: Iterable[float]) -> list[float | None]:
    """Six digits: more than a screen shows at any zoom that a training loss bears."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
