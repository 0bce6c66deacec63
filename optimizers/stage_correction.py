"""Build a correction by name for one stage, whose delay and mismatch decide how far it reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizers.correction_catalogue import check_correction
from optimizers.corrections import Correction, PlainUpdate, build_correction
from optimizers.discount import LrDiscount
from optimizers.discrepancy import DiscrepancyCorrection
from optimizers.options import Value
from optimizers.prediction import WeightPrediction


def build_stage_correction(
    name: str, *, options: Mapping[str, Value], delay: int, mismatch: int
) -> Correction:
    """The correction `name` for a stage.

    `delay-compensation` changes the gradient and not the update, so here it is the plain update; the gradient
    is passed to `optimizers.compensation.compensate` before it is clipped. `sync-start` chooses the program
    and leaves the update plain. Where the stage has no mismatch (the last one), `discrepancy` is the plain
    update, too.

    Args:
        name: One of `optimizers.CORRECTIONS`.
        options: What differs from the correction's defaults.
        delay: Most updates between the weights of the stage's gradients and those they are applied to.
        mismatch: Most versions between forward and backward of a micro-batch at the stage.

    Raises:
        ValueError: Unknown correction or option, or a value that is not accepted.
    """
    settings: dict[str, Any] = dict(check_correction(name, options))
    if name == "error-feedback":
        return build_correction(coefficient=settings["coefficient"])
    if name == "error-feedback-buffered":
        return build_correction(form="buffered", **settings)
    if name == "weight-prediction":
        return WeightPrediction(settings["reach"] * delay, settings["flavour"])
    if name == "lr-discount":
        return LrDiscount(PlainUpdate(), delay=delay, anneal=settings["anneal"])
    if name == "discrepancy" and mismatch > 0:
        return DiscrepancyCorrection(mismatch, settings["memory"])
    return PlainUpdate()
