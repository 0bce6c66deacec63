"""The warm-up computes what a first micro-batch and step do once, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.small_runs import Operators, ranks_of, small_config
from support.training_cases import named
from torch import Tensor

from optimizers import NAMES
from stages.pipeline.executor import RankExecutor
from stages.pipeline.warm_up import warm_up_ranks
from stages.resolve.facts import facts
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


@pytest.mark.parametrize(
    "case",
    [
        *({"optimizer": optimizer} for optimizer in NAMES),
        {"precision": "bfloat16", "recompute": "full"},
        {"schedule": "zero-bubble"},
    ],
    ids=named,
)
def test_it_steps_once_and_leaves_nothing_behind(case: dict[str, str]) -> None:
    config = small_config(**{"schedule": "2bw"} | case, stages=1, layers=2)
    [rank] = ranks_of(config)
    state = rank.stages[0]
    optimizer, replica, gathering = (
        state.update.optimizer,
        state.weights.newest(),
        state.weights.gradient_buffer,
    )
    assert optimizer is not None

    def groups() -> list[dict[str, Any]]:
        return [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]

    before, random = (held(state), groups()), torch.get_rng_state()
    with Called() as called:
        warm_up_ranks([rank], facts(config), device=torch.device("cpu"))
    assert all(map(torch.equal, held(state), before[0]))
    assert groups() == before[1]
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert gathering.versions == []
    replica = state.weights.newest()
    assert replica.pending_backwards == 0
    # What was gathered into is what later backwards gather into.
    views = zip(replica.parameters, gathering.views, strict=True)
    assert all(parameter.grad is view for parameter, view in views)
    assert "_linalg_eigh" in called.names or case.get("optimizer") not in ("soap", "basis-rotation")


def test_memory_is_rehearsed_after_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture gives back all memory that torch keeps, pinned memory too, which a run must not allocate."""
    config = small_config("2bw", stages=1, layers=2, **{"train.cuda_graphs": True})
    ranks = ranks_of(config)
    done: list[str] = []
    monkeypatch.setattr(RankExecutor, "capture", lambda executor, programs, **shapes: done.append("capture"))
    monkeypatch.setattr(RankExecutor, "rehearse", lambda executor, programs: done.append("rehearse"))
    warm_up_ranks(ranks, facts(config), device=torch.device("cpu"))
    assert done == ["capture", "rehearse"]
