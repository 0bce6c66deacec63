"""The warm-up computes what a first micro-batch and step do once, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.operators import Operators
from support.small_runs import ranks_of, small_config
from torch import Tensor

from optimizers import NAMES
from stages.pipeline.warm_up import warm_up_ranks
from stages.update.optimizer_step import StageState


class Called(Operators):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def note(self, operator: Any, given: tuple[Any, ...], out: Any) -> None:
        self.names.add(operator.overloadpacket.__name__)


def held(state: StageState) -> list[Tensor]:
    """All that a stage computes with."""
    weights = state.weights
    tensors = [*weights.master.parameters, *(replica.flat for replica in weights.replicas)]
    return [tensor.detach().clone() for tensor in [*tensors, *(buffer.flat for buffer in weights.gradients)]]


@pytest.mark.parametrize("optimizer", NAMES)
def test_it_steps_once_and_leaves_nothing_behind(optimizer: str) -> None:
    config = small_config("2bw", stages=1, layers=2, optimizer=optimizer)
    [rank] = ranks_of(config)
    state = rank.stages[0]
    assert state.update.optimizer is not None
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in state.update.optimizer.param_groups
    ]
    before, random = held(state), torch.get_rng_state()
    with Called() as called:
        warm_up_ranks([rank], config, device=torch.device("cpu"))
    assert all(map(torch.equal, held(state), before))
    assert torch.equal(torch.get_rng_state(), random)
    assert not state.update.optimizer.state
    assert groups == [
        {key: value for key, value in group.items() if key != "params"}
        for group in state.update.optimizer.param_groups
    ]
    assert "_linalg_eigh" in called.names or optimizer not in ("soap", "basis-rotation")
