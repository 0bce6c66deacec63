"""Build a correction by name for one stage, with its delay and mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizers.corrections.base import Correction, PlainUpdate
from optimizers.corrections.catalogue import check_correction
from optimizers.corrections.discrepancy import DiscrepancyCorrection
from optimizers.corrections.error_feedback import build_error_feedback
from optimizers.corrections.lr_discount import LrDiscount
from optimizers.corrections.weight_prediction import WeightPrediction
from optimizers.options import Value


def build_stage_correction(
    name: str, *, options: Mapping[str, Value], delay: int, mismatch: int
) -> Correction:
    """The correction `name` for a stage.

    It is the plain update for `delay-compensation`, which changes the gradient before clipping
    (`optimizers.corrections.dc_asgd`), for `sync-start`, which changes the program, and for `discrepancy`
    at a stage without mismatch (the last one).

    Args:
        name: One of `optimizers.CORRECTIONS`.
        options: What differs from the correction's defaults.
        delay: The most updates between the weights of the stage's gradients and those they are applied to.
        mismatch: The most versions between a micro-batch's forward and its backward at the stage.

    Raises:
        ValueError: Unknown correction or option, or a value that is not accepted.
    """
    settings: dict[str, Any] = dict(check_correction(name, options))
    if name == "error-feedback":
        return build_error_feedback(coefficient=settings["coefficient"])
    if name == "error-feedback-buffered":
        return build_error_feedback(form="buffered", **settings)
    if name == "weight-prediction":
        return WeightPrediction(settings["reach"] * delay, settings["flavour"])
    if name == "lr-discount":
        return LrDiscount(PlainUpdate(), delay=delay, anneal=settings["anneal"])
    if name == "discrepancy" and mismatch > 0:
        return DiscrepancyCorrection(mismatch, settings["memory"])
    return PlainUpdate()
