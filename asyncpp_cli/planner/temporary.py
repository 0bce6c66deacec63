"""Memory that is taken within one action and given back: what a device needs beyond what a stage holds."""

from __future__ import annotations

from math import prod

from stages.config import RunConfig
from stages.memory import parameter_shapes, sizes
from stages.partition import StageCut

_COPIES = {"adan": 4, "mars": 3, "soap": 4, "basis-rotation": 4}
"""Copies of its parameters that an optimizer's step makes; the others make two."""


def backward_bytes(config: RunConfig, cut: StageCut) -> int:
    """In a backward: gradients on their way, and of one matrix before it is added."""
    model, size = config.model, sizes(config)
    tokens = config.train.microbatch_size * config.data.context
    passing = 4 * model.mlp_width * size.replica
    if cut.has_head:
        # The loss is computed in a wider type where the logits are narrow.
        passing = max(passing, model.vocab_size * (size.wide + size.replica))
    largest = max(prod(shape) for shape in parameter_shapes(config.model, cut).values())
    return tokens * passing + largest * size.replica


def update_bytes(config: RunConfig, owned: int) -> int:
    """In an optimizer step on so many parameters."""
    copies = _COPIES.get(config.optimizer.name, 2)
    if config.error_feedback.coefficient != 0 and config.train.precision == "bfloat16":
        copies += 1  # the weights before the step
    return copies * owned * sizes(config).master
