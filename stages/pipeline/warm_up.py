"""Warms up a stage: its first micro-batch and step, before ranks wait for each other."""

from __future__ import annotations

import torch

from stages.config import RunConfig
from stages.memory.measure import leaving_no_trace
from stages.pipeline.build import activation_shape, dtypes
from stages.update.optimizer_step import StageState


def warm_up(state: StageState, config: RunConfig, *, device: torch.device) -> None:
    """Perform a forward, a backward and a step, and discard their effects.

    A receive that is posted ahead occupies a GPU until its message arrives. One-time work of a first
    micro-batch or step (compiling, loading kernels, allocating) may wait for an idle device, while the
    message waits for that work. So it is done before any receive is posted, on all ranks at once.
    """
    module = state.weights.newest().module
    shape = activation_shape(config)
    tokens = torch.zeros(shape[:2], dtype=torch.long, device=device)
    activation = torch.zeros(shape, dtype=dtypes(config).replica, device=device).requires_grad_()
    with leaving_no_trace(module, device), torch.enable_grad():
        given = tokens if module.embedding is not None else activation
        output = module(given, targets=tokens if module.head is not None else None)
        output.sum().backward()
    state.weights.gradient_buffer.flat.zero_()
    if state.tied is not None:
        state.tied.clear()
    state.update.rehearse()
