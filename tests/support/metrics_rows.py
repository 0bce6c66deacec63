"""Rows of a run's metrics."""

from __future__ import annotations


def step_row(step: int) -> dict[str, object]:
    return {"kind": "step", "step": step, "train_loss": 1.0 / step, "tokens": 8 * step, "seconds": 0.5 * step}


def diagnostics_row(step: int, lr_sharpness: float | None, *, along: float = 1.0) -> dict[str, object]:
    known = {"lr_sharpness": lr_sharpness, "lr_sharpness_along_update": along, "limit": 38.0}
    cosines = {"update_cosine": 0.5, "gradient_cosine": 0.25}
    return {
        "kind": "diagnostics",
        "step": step,
        **known,
        **cosines,
        "diagnostics_seconds": 2.0,
        "seconds": 1.0,
    }
