"""Rows of metrics as plain values, which tests write and compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncpp_cli.report.load.measure import Measurement, measure
from asyncpp_cli.report.load.metrics_rows import by_kind
from asyncpp_cli.runs.run_folder import Run
from stages.rows import Row, Segment, Step, parsed


def step_row(step: int) -> dict[str, Any]:
    row = Step(
        step=step,
        tokens=8 * step,
        train_loss=1.0 / step,
        lr=1e-3,
        grad_norm=None,
        skipped=False,
        seconds=0.5 * step,
    )
    return row.plain()


def segment(first_step: int = 0, steps: int = 1, **further: Any) -> Segment:
    """A segment in which nothing else was measured."""
    unknown = {"steady_tokens": 0, "steady_seconds": 0.0, "busy": [], "delay_max": [0], "mismatch_max": [0]}
    return Segment(**{"first_step": first_step, "steps": steps, "seconds": 1.0, **unknown, **further})


def typed(row: Mapping[str, Any]) -> Row:
    """A row as readers have it."""
    found = parsed(json.dumps(row).encode())
    assert found is not None
    return found


def plain(run: Run) -> list[dict[str, Any]]:
    """The valid rows of a run, as they are written."""
    return [row.plain() for row in run.rows()]


def measured(rows: Sequence[Mapping[str, Any]]) -> Measurement:
    """The numbers of a run with these rows."""
    return measure(by_kind(map(typed, rows)))
