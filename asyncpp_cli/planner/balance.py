"""How evenly a model is cut into stages, by multiply-adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stages.config import RunConfig
from stages.model.families.catalogue import describe
from stages.model.partition import StageCut, cut_model

STAGES = (4, 8, 16)
"""Numbers of stages that are compared."""


class Balance(NamedTuple):
    """The most even cuts into a number of stages, one on each rank."""

    stages: int
    whole: float
    """Efficiency with stages of whole blocks: mean multiply-adds of a stage over those of the largest."""
    within: float
    """The same where a stage may begin and end within a block, and the last may have the head alone."""
    cut: list[float]
    """The latter cut, as in `parallel.cut`."""


def balances(config: RunConfig) -> Iterator[Balance]:
    """The cuts of a run's model into each of `STAGES`."""
    context = config.data.context
    for stages in STAGES:
        if stages <= config.model.layers:
            whole = cut_model(config.model, stages=stages, context=context)
            within = cut_model(config.model, stages=stages, context=context, within_blocks=True)
            yield Balance(
                stages, efficiency(config, whole), efficiency(config, within), [cut.size for cut in within]
            )


def efficiency(config: RunConfig, cuts: list[StageCut]) -> float:
    """Mean multiply-adds of a stage over those of the largest, in 0..1."""
    spec, context = describe(config.model), config.data.context
    loads = [
        sum(spec.halves[half].forward_multiply_adds(context=context) for half in cut.halves)
        + cut.has_head * spec.head.forward_multiply_adds(context=context)
        for cut in cuts
    ]
    return sum(loads) / len(loads) / max(loads)
