"""The 10B model on 4 stages and 16 data ranks, with tensors that have sizes and no memory: what every stage
allocates is what the plan says, kind by kind, and nothing else is large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from support.small_runs import small_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import stages.update.update_phases
from asyncpp_cli.experiment.shipped import model_settings
from asyncpp_cli.planner.costs.devices import find_device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.estimate import estimate
from asyncpp_cli.runs.settings import assign
from stages.comm.collectives import DistributedGroup, Exchange
from stages.comm.communicator import Communicator
from stages.comm.p2p import Links
from stages.comm.topology import Connection
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.data.dataset import prepare
from stages.pipeline.build import Rank, activation_shape, build_ranks, dtypes

GB = 10**9
DATA = 16
COSTS = Roofline(find_device("h100", key=""))


class Allocations(TorchDispatchMode):
    """Notes every piece of memory that an operator gives, and the most that there was at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[StorageWeakRef(storage)] = storage.nbytes()
        return given

    def larger_than(self, limit: int, *, without: Iterable[Tensor]) -> list[int]:
        """Sizes of what was allocated, still there or not, but for what these tensors lie in."""
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in without}
        return sorted(size for storage, size in self.seen.items() if size > limit and storage not in known)

    def living(self) -> dict[StorageWeakRef, int]:
        return {storage: size for storage, size in self.seen.items() if not storage.expired()}


class Silent:
    """An operation that is done at once, and leaves what it was given as it is."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> object:
        return None


class SilentRanks:
    """A communicator whose other members bring nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: Silent()


class SilentNeighbours:
    """Links whose messages are there at once."""

    waits = True
    most_message_bytes = 0

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def begin(self, program: Any) -> None:
        pass

    def passed(self, moment: int) -> None:
        pass

    def send(self, message: Any, tensor: Tensor) -> None:
        pass

    def receive(self, message: Any) -> Tensor:
        return torch.empty(activation_shape(self._config), dtype=dtypes(self._config).replica)


@contextmanager
def every_gradient_finite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def reading(numbers: Tensor) -> Exchange[list[float]]:
        return Exchange(ready=lambda: True, wait=lambda: None, take=lambda: [0.0] * len(numbers))

    with monkeypatch.context() as patch:
        patch.setattr(stages.update.update_phases, "to_host", reading)
        yield


def ten_billion(schedule: str, *, microbatches: int) -> RunConfig:
    config = small_config(schedule, stages=4, data=DATA, microbatches=microbatches, steps=4, recompute="full")
    assign(config, model_settings("10b", None))
    config.train.precision = "bfloat16"
    config.train.microbatch_size = 1
    config.data.context = 4096
    config.data.validation_share = 0.4
    return config


def rank_of(config: RunConfig, stage: int) -> Rank:
    """One stage, as data rank 0, which owns the largest parameter."""
    data = DistributedGroup(cast(Communicator, SilentRanks()), rank=0, size=DATA)
    pipeline = DistributedGroup(cast(Communicator, SilentRanks()), rank=stage, size=4)
    links = cast(Links, SilentNeighbours(config))
    (rank,) = build_ranks(
        config,
        connections=[Connection(rank=stage, links=links, pipeline=pipeline, data=data)],
        corpus=prepare(config.data),
        device=torch.device("cpu"),
        on_step=lambda result: None,
        stop=lambda: False,
    )
    with rank.stages[stage].weights.receiving_initial():
        pass  # values are of no interest
    return rank


def held_by(rank: Rank, stage: int) -> dict[str, list[Tensor]]:
    """All tensors that a stage keeps, by kind."""
    state = rank.stages[stage]
    assert state.update.optimizer is not None
    kept = state.update.optimizer.state.values()
    return {
        "weights": [parameter for replica in state.weights.replicas for parameter in replica.parameters],
        "master": list(state.weights.master.parameters),
        "gradients": [buffer.flat for buffer in state.weights.gradients],
        "optimizer": [tensor for of_one in kept for tensor in of_one.values() if tensor.ndim > 0],
    }


def bytes_of(tensors: list[Tensor]) -> int:
    storages = {
        StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


@contextmanager
def without_memory() -> Iterator[Allocations]:
    with FakeTensorMode(allow_non_fake_inputs=True), Allocations() as allocations:
        yield allocations


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.slow
def test_planned_memory_is_what_every_stage_keeps(schedule: str) -> None:
    config = ten_billion(schedule, microbatches=3)
    planned = estimate(config, COSTS, limit_gb=None).memory
    for stage in range(4):
        with without_memory() as allocations:
            rank = rank_of(config, stage)
            state = rank.stages[stage]
            gradient = state.weights.take_gradient()
            rank.connection.data.reduce_scatter(
                gradient.flat, state.weights.reduction, early=schedule == "1f1b"
            )
            assert state.update.optimizer is not None
            state.update.optimizer.step()
            kinds = held_by(rank, stage)
            assert {kind: bytes_of(tensors) for kind, tensors in kinds.items()} == {
                kind: planned[stage][kind] for kind in kinds
            }
            assert rank.connection.data.room_bytes == planned[stage]["reduction"] <= GB
            # Of what is left there is next to nothing: step counters, rotations.
            held = sum(bytes_of(tensors) for tensors in kinds.values()) + planned[stage]["reduction"]
            assert 0 <= sum(allocations.living().values()) - held < 0.01 * GB


@pytest.mark.slow
def test_a_step_takes_no_gigabyte_beside_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ten_billion("1f1b", microbatches=1)
    program = segment_program(config, first_step=0, steps=1)
    with every_gradient_finite(monkeypatch), without_memory() as allocations:
        rank = rank_of(config, 3)
        for _ in rank.executor.run(program):
            raise AssertionError("nothing to wait for")
        known = [tensor for tensors in held_by(rank, 3).values() for tensor in tensors]
        assert allocations.larger_than(GB, without=known) == []
        assert len(allocations.seen) > 1000
