"""Build a correction by name for one stage, with its delay and mismatch."""

from __future__ import annotations

from collections.abc import Mapping

from optimizers.corrections.base import Correction, PlainUpdate
from optimizers.corrections.catalogue import check_correction, correction_named
from optimizers.named import import_named
from optimizers.options import Value


def build_stage_correction(
    name: str, *, options: Mapping[str, Value], delay: int, mismatch: int
) -> Correction:
    """The correction `name` for a stage; the plain update where the catalogue says that it is not active.

    Args:
        name: One of `optimizers.CORRECTIONS`.
        options: What differs from the correction's defaults.
        delay: The most updates between the weights of the stage's gradients and those they are applied to.
        mismatch: The most versions between a micro-batch's forward and its backward at the stage.

    Raises:
        ValueError: Unknown correction or option, or a value that is not accepted.
    """
    method, settings = correction_named(name), check_correction(name, options)
    if not method.factory or not method.active(settings, mismatch):
        return PlainUpdate()
    made: Correction = import_named(method.factory)(settings, delay=delay, mismatch=mismatch)
    return made
