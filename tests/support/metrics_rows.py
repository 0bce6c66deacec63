"""Rows of a run's metrics."""

from __future__ import annotations


def step_row(step: int) -> dict[str, object]:
    return {"kind": "step", "step": step, "train_loss": 1.0 / step, "tokens": 8 * step, "seconds": 0.5 * step}
