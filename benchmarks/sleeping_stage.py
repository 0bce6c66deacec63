"""A stage that sleeps a known time in the place of computing, so that few cores can time many ranks."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stages.comm.collectives import Exchange, Group, Reduction
from stages.comm.communicator import Communicator, Work
from stages.comm.gradient_reduction import runs_of
from stages.comm.reduction_rounds import reduction_plan
from stages.model.experts import Routing
from stages.model.gradients.split_backward import deferred_now
from stages.model.head_loss import next_token_loss
from stages.model.head_shard import HeadShard, ShardPass
from stages.shape.optimizer_sharding import assign_owners
from stages.update.balance import LoadTally
from stages.update.optimizer_step import UpdateResult

SHAPE = (1, 8, 64)
"""Of every activation."""

LAYERS = 8
"""Of a stage with data-parallel peers: its gradients become whole one after another within a backward."""
ENTRIES = 2**16
"""Weights of a layer that each data rank owns, so that there is something to reduce and spread."""


HEAD_ROWS = 8
"""Of a shard of the head."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, stage: SleepingStage, layer: int, *weights: Tensor) -> Tensor:
        ctx.stage, ctx.layer, ctx.weights = stage, layer, len(weights)
        ctx.deferred = deferred_now()
        if layer == 0:
            time.sleep(stage.seconds)
        return given * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stage, done = ctx.stage, len(ctx.stage.layers) - ctx.layer
        if done == 1:
            stage.backward_began = time.perf_counter()
        halves = 2
        if ctx.deferred is not None:
            halves = 1
            ctx.deferred.leave([], partial(time.sleep, stage.seconds / len(stage.layers)))
        # Until a point in time, so that what comes late in one layer does not add up over the layers.
        end = stage.backward_began + halves * stage.seconds * done / len(stage.layers)
        time.sleep(max(0.0, end - time.perf_counter()))
        return gradient * 1.0, None, None, *(torch.zeros(1) for _ in range(ctx.weights))


class SleepingStage(nn.Module):
    """Takes and returns activations of `SHAPE`, after a sleep; twice as long backward, once in each half of a
    split one.

    Args:
        seconds: of a forward.
        data: data ranks, of which each owns one weight of every layer.
    """

    def __init__(self, seconds: float, *, data: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.zeros(1) for _ in range(data)) for _ in range(LAYERS if data > 1 else 1)
        )
        self.seconds = seconds
        self.backward_began = 0.0

    def forward(
        self,
        given: Tensor,
        routing: Routing | None = None,
        *,
        targets: Tensor | None = None,
        documents: None = None,
    ) -> Tensor:
        out = given.float()
        for layer, weights in enumerate(self.layers):
            out = _Sleep.apply(out, self, layer, *weights)
        return out if targets is None else next_token_loss(out, targets)


class SleepingHeadShard(HeadShard):
    """A few rows of a head, which sleep as long as many.

    Args:
        seconds: of a forward of its share of the head.
        rank: of the pipeline.
    """

    def __init__(self, seconds: float, *, rank: int) -> None:
        super().__init__(SHAPE[-1], range(rank * HEAD_ROWS, (rank + 1) * HEAD_ROWS))
        nn.init.zeros_(self.weight)
        self.weight.grad = torch.zeros_like(self.weight)
        self.seconds = seconds

    @property
    def head(self) -> SleepingHeadShard:
        """As a stage has it."""
        return self

    def run(
        self, hidden: Tensor, targets: Tensor, *, with_gradients: bool = True
    ) -> tuple[Tensor, ShardPass | None]:
        time.sleep(2 * self.seconds)
        return super().run(hidden, targets, with_gradients=with_gradients)

    def gradient_factors(self, kept: ShardPass, sums: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return super().gradient_factors(kept, sums, scale=scale)


class SleepingWeights:
    """In the place of `WeightVersions`: every version is the same sleeping module, and its own replica."""

    def __init__(self, module: nn.Module, *, data: Group) -> None:
        self.module = module
        self.parameters = list(self.module.parameters())
        sizes = [ENTRIES] * len(self.parameters)
        self.ownership = assign_owners([(size,) for size in sizes], data_ranks=data.size)
        self.reduction = reduction_plan(sizes, self.ownership, number_bytes=4)
        self.flat = torch.zeros(sum(sizes))
        gradient = torch.ones(sum(sizes))
        owned = runs_of(gradient, self.ownership.runs[data.rank])
        self._gradient = SimpleNamespace(
            flat=gradient,
            part=None,
            owned_views=owned,
            counted_views=owned,
            views=self.parameters,
            versions=[],
            loads=torch.zeros(0, 0),
        )
        self._gradient.count = lambda version, loads: self._gradient.versions.append(version)
        # As many as 2bw has, so that no backward waits for an update.
        self.gradients = (self._gradient, self._gradient)
        self.version = 0
        self.pending_backwards = 0
        self.replicas = (self,)
        self.writes = 0

    @property
    def gradient_buffer(self) -> Any:
        return self._gradient

    def replica_of(self, version: int) -> SleepingWeights:
        self.version = version
        return self

    def routing(self) -> Routing:
        return Routing({})

    def oldest(self) -> SleepingWeights:
        return self

    def receiving_others(self, replica: SleepingWeights, *, version: int) -> AbstractContextManager[None]:
        return torch.no_grad()

    reduces_early = True

    def before_backward(self, *, last: bool) -> None:
        pass

    def reduce(self, data: Group, gradient: Any, *, early: bool) -> Reduction:
        return data.reduce_scatter(gradient.flat, self.reduction, early=early, part=None)

    def hand_out(self, data: Group, replica: SleepingWeights) -> Exchange[None]:
        return data.broadcast(replica.flat, self.ownership.runs)

    def take_gradient(self) -> Any:
        taken = SimpleNamespace(**vars(self._gradient))
        self._gradient.versions = []
        return taken


class NoUpdate:
    """In the place of `StageUpdate`."""

    tally = LoadTally([], experts=0, device=torch.device("cpu"))

    def prepare(self, gradient: Any) -> None:
        pass

    def clip(self, gradient: Any, *, squared: Tensor) -> None:
        pass

    def at_backward(self, replica: Any, *, mismatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(
        self, gradient: Any, *, version: int, step: int, clip_by: float | None, finite: bool
    ) -> UpdateResult:
        gradient.flat.fill_(1.0)
        return UpdateResult(lr=0.0, grad_norm=None, skipped=False)


class EmulatedBatches:
    """In the place of `Batches`."""

    def tokens(self, microbatch: int) -> Tensor:
        return torch.zeros(SHAPE)

    def targets(self, microbatch: int) -> Tensor:
        return torch.zeros(SHAPE[:2], dtype=torch.long)

    def documents(self, microbatch: int) -> None:
        return None


class SlowNetwork:
    """A communicator whose exchanges take a known time, as over a slow network: others go on meanwhile.

    Args:
        communicator: that does the work.
        seconds: that the whole gradient of a stage takes, its parts being of equal size.
        spread: seconds that the whole new weights of a stage take.
        owners: data ranks, each of which owns as many of them.
    """

    def __init__(self, communicator: Communicator, *, seconds: float, spread: float, owners: int) -> None:
        self.allgather = communicator.allgather
        self.send = communicator.send
        self.recv = communicator.recv
        self._communicator = communicator
        self._seconds = seconds
        self._spread = spread
        self._owners = owners
        self._free_at = 0.0

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work:
        work = self._communicator.alltoall_base(output, given, output_sizes, given_sizes)
        # One after another, each as long as its largest piece.
        return self._slow(work, self._seconds * max(given_sizes) / (LAYERS * ENTRIES))

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        work = self._communicator.broadcast(tensor, root)
        return self._slow(work, self._spread * tensor.numel() / (LAYERS * ENTRIES * self._owners))

    def _slow(self, work: Work, takes: float) -> _Slow:
        self._free_at = max(self._free_at, time.perf_counter()) + takes
        return _Slow(work, until=self._free_at)


class _Slow:
    def __init__(self, work: Work, *, until: float) -> None:
        self._work = work
        self._until = until

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._until and self._work.is_completed()

    def wait(self) -> object:
        time.sleep(max(0.0, self._until - time.perf_counter()))
        return self._work.wait()


def left_to_hide(*, backward: float, reduction: float) -> float:
    """Seconds of a reduction that nothing hides: layer by layer it goes under the last backward of a flush.

    A layer's gradient cannot leave before it is whole, and the network takes one at a time. So what is left
    after the backward is the last layer at least, and whatever the network has not managed by then.
    """
    layer = reduction / LAYERS
    return max(layer, reduction - backward * (1 - 1 / LAYERS))
