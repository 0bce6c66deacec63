"""How sure a planned ratio is, by the planner's errors on published runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from asyncpp_cli.planner.listing import Layout

WITHIN: Mapping[str, float] = {"schedules": 0.04, "fsdp": 0.13, "long context": 0.15, "many GPUs": 0.08}
"""For four of five comparisons of two published runs, the most that the logarithm of their planned ratio of
speeds is off: of two pipelines of one source; and of a pipeline with an FSDP run, with one of at least `LONG`
tokens of context, and with one on at least `MANY` GPUs."""
LONG, MANY = 8192, 256


def kind_of(*, pipeline: bool, context: int, gpus: int) -> str:
    """One of `WITHIN`, by which a run is compared with a pipeline."""
    if pipeline:
        return "schedules"
    return "long context" if context >= LONG else "many GPUs" if gpus >= MANY else "fsdp"


def likely_ratio(synchronous: Layout, other: Layout) -> tuple[float, float]:
    """Time of a synchronous step over another's: four of five published comparisons of such layouts say that
    it is between these."""
    config = synchronous.config
    gpus = config.parallel.stages * config.parallel.data
    kind = kind_of(pipeline=bool(synchronous.cut), context=config.data.context, gpus=gpus)
    ratio, factor = synchronous.step.seconds / other.step.seconds, math.exp(WITHIN[kind])
    return ratio / factor, ratio * factor
