"""Memory that a device needs beyond what a stage holds: what an action takes and gives back, what NCCL keeps
for its communicators, and what torch's allocator cannot use."""

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
    # Autograd turns a narrow gradient into one of the buffer's type before it adds it.
    wider = size.master if size.master != size.replica else 0
    return tokens * passing + largest * (size.replica + wider)


def update_bytes(config: RunConfig, owned: int) -> int:
    """In an optimizer step on so many parameters."""
    copies = _COPIES.get(config.optimizer.name, 2)
    if config.error_feedback.coefficient != 0 and config.train.precision == "bfloat16":
        copies += 1  # the weights before the step
    return copies * owned * sizes(config).master


NCCL_BUFFER = 2**22
"""Bytes of a channel's buffer for each peer: `NCCL_BUFFSIZE`, unless something else is set."""
LINK_CHANNELS = 4
"""Of a communicator between two stages."""
GROUP_CHANNELS = 32
"""Of one between more ranks: NCCL takes 16 to 32, as many as links between the GPUs can use."""
ALLOCATOR_SHARE = 0.05
"""Of memory that comes and goes: pieces of several sizes take turns there, and leave gaps between them. What
is allocated once and kept leaves none."""


def communicator_bytes(*, neighbours: int, stages: int, data: int) -> int:
    """What NCCL keeps for a rank's communicators, about: a buffer a channel and peer, sent and received.

    Each neighbour has a communicator a direction. The group of a pipeline exchanges a few numbers around a
    ring; that of the data ranks also sends every member something at once, a channel for each.

    Args:
        neighbours: of the rank along its pipeline.
        stages: ranks of the pipeline.
        data: data ranks.
    """
    buffers = 2 * neighbours * LINK_CHANNELS
    buffers += 2 * GROUP_CHANNELS * ((stages > 1) + (data > 1))
    buffers += 2 * (data - 1)
    return buffers * NCCL_BUFFER


def allocator_bytes(coming_and_going: int) -> int:
    """What torch's allocator holds beside what is in use, where so much of that comes and goes."""
    return round(ALLOCATOR_SHARE * coming_and_going)
