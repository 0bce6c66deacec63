"""A stage's first micro-batch and first step, before the ranks wait for each other's."""

from __future__ import annotations

import torch

from stages.assemble import activation_shape, dtypes
from stages.config import RunConfig
from stages.model import next_token_loss
from stages.update import StageState
from stages.weigh import leaving_no_trace


def warm_up(state: StageState, config: RunConfig, *, device: torch.device) -> None:
    """Compute a micro-batch forward and backward, and a step, and leave nothing of them behind.

    A receive that is posted ahead occupies a GPU until its message comes. What a first micro-batch or step
    does once (compiling, loading kernels, taking memory) can wait for the device to be idle, and the message
    for what is to be computed. So it is done before any receive is posted, and by all ranks at once.
    """
    module = state.weights.newest().module
    shape = activation_shape(config)
    tokens = torch.zeros(shape[:2], dtype=torch.long, device=device)
    activation = torch.zeros(shape, dtype=dtypes(config).replica, device=device).requires_grad_()
    with leaving_no_trace(module, device), torch.enable_grad():
        output = module(tokens if module.embedding is not None else activation)
        if module.head is not None:
            output = next_token_loss(output, tokens)
        output.sum().backward()
    state.weights.gathering.flat.zero_()
    state.update.rehearse()
