from __future__ import annotations

import pytest
import torch
from support.small_runs import small_config
from torch import Tensor

from stages.comm.collectives import InProcessExchanges, InProcessGroup
from stages.shape.partition import cut_model
from stages.weights.weight_versions import WeightVersions

TOKENS = torch.tensor([[1, 2, 3, 4]])


def versions(
    *, replicas: int, precision: str = "float32", data_rank: int = 0, data_ranks: int = 1
) -> WeightVersions:
    config = small_config(layers=1, precision=precision)
    (cut,) = cut_model(config.model, stages=1, context=12)
    return WeightVersions(
        config,
        cut,
        replicas=replicas,
        gradient_buffers=2,
        device=torch.device("cpu"),
        data_rank=data_rank,
        data_ranks=data_ranks,
    )


def write(weights: WeightVersions, version: int, *, value: float) -> None:
    with weights.overwriting_oldest(version=version, biases=weights.newest().biases) as parameters:
        for parameter in parameters:
            parameter.fill_(value)


def forward(weights: WeightVersions, version: int) -> Tensor:
    replica = weights.replica_of(version)
    replica.pending_backwards += 1
    return replica.module(TOKENS).sum()


def test_a_new_version_takes_the_place_of_the_oldest() -> None:
    weights = versions(replicas=2)
    first = weights.replica_of(0)
    write(weights, 1, value=0.1)
    assert weights.replica_of(0) is first
    assert weights.replica_of(1) is not first
    write(weights, 2, value=0.2)
    assert weights.replica_of(2) is first
    with pytest.raises(RuntimeError, match=r"reads version 0, this stage holds \[1, 2\]"):
        weights.replica_of(0)


def test_a_stash_that_is_overwritten_too_early_is_caught_by_autograd() -> None:
    weights = versions(replicas=2)
    loss = forward(weights, 0)
    write(weights, 1, value=0.1)
    write(weights, 2, value=0.2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_without_a_stash_the_backward_reads_the_new_values(precision: str) -> None:
    """The gradient of the embedding passes through every matrix: twice the head doubles it."""

    def embedding_gradient(*, scale: float) -> Tensor:
        weights = versions(replicas=1, precision=precision)
        loss = forward(weights, 0)
        with weights.overwriting_oldest(version=1, biases=weights.newest().biases) as parameters:
            parameters[weights.names.index("head.weight")].mul_(scale)
        loss.backward()
        return weights.gradient_buffer.views[weights.names.index("embedding.weight")].clone()

    unchanged, doubled = embedding_gradient(scale=1.0), embedding_gradient(scale=2.0)
    assert unchanged.abs().max() > 0
    assert torch.equal(doubled, 2 * unchanged)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_backwards_of_all_replicas_gather_into_one_buffer_of_the_masters_type(precision: str) -> None:
    weights = versions(replicas=2, precision=precision)
    with weights.overwriting_oldest(version=1, biases=weights.newest().biases) as parameters:
        for parameter, source in zip(parameters, weights.replicas[0].parameters, strict=True):
            parameter.copy_(source)
    forward(weights, 0).backward()
    once = weights.gradient_buffer.flat.clone()
    forward(weights, 1).backward()
    assert once.dtype == torch.float32
    assert once.abs().max() > 0
    torch.testing.assert_close(weights.gradient_buffer.flat, 2 * once)
    taken = weights.take_gradient()
    assert weights.gradient_buffer is not taken
    assert all(
        parameter.grad is not None and torch.equal(parameter.grad, view)
        for parameter, view in zip(weights.master.parameters, taken.views, strict=True)
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_data_ranks_draw_what_they_own_and_together_the_weights_of_one(precision: str) -> None:
    whole = versions(replicas=1, precision=precision)
    drawn = [versions(replicas=2, precision=precision, data_rank=rank, data_ranks=3) for rank in range(3)]
    masters = {name: value for one in drawn for name, value in zip(*vars(one.master).values(), strict=True)}
    for name, value in zip(whole.master.names, whole.master.parameters, strict=True):
        assert torch.equal(masters[name], value)
    meeting = InProcessExchanges(3)
    spreading = []
    for rank, one in enumerate(drawn):
        for number, value in enumerate(one.replicas[0].parameters):
            # Who draws a matrix that is another's would do the work of all.
            assert value.any() or number not in one.owned
            assert not value.any() or number in one.owned
        with pytest.raises(RuntimeError, match="reads version 0, this stage holds"):
            one.replica_of(0)
        group = InProcessGroup(meeting, rank=rank)
        spreading.append(group.broadcast(one.replicas[0].flat, one.ownership.runs))
    for one, exchange in zip(drawn, spreading, strict=True):
        with one.receiving_initial():
            exchange.take()
        pairs = zip(one.replica_of(0).parameters, whole.replica_of(0).parameters, strict=True)
        assert all(torch.equal(mine, same) for mine, same in pairs)
