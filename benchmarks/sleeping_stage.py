"""A stage that sleeps a known time in the place of computing, so that few cores can time many ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stages.groups import Exchange, Group
from stages.ownership import share_out
from stages.update import UpdateResult

SHAPE = (1, 8, 64)
"""Of every activation."""

ENTRIES = 1024
"""Weights that each data rank owns, so that there is something to reduce and spread."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return given * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient * 1.0, torch.zeros(1), None


class SleepingStage(nn.Module):
    """Takes and returns activations of `SHAPE`, after a sleep."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = seconds

    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(given.float(), self.weight, self.seconds)
        return out


class SleepingWeights:
    """In the place of `WeightVersions`: every version is the same sleeping module, and its own replica."""

    def __init__(self, seconds: float, *, data: Group) -> None:
        self.module = SleepingStage(seconds)
        self.ownership = share_out([ENTRIES] * data.size, data_ranks=data.size)
        self.flat = torch.zeros(ENTRIES * data.size)
        self._gradient = torch.ones(ENTRIES * data.size)
        self._part = slice(*self.ownership.bounds[data.rank : data.rank + 2])
        self.version = 0
        self.pending_backwards = 0
        self.versions: list[int] = []
        self.replicas = (self,)
        self.writes = 0

    @property
    def gathering(self) -> SleepingWeights:
        return self

    def holding(self, version: int) -> SleepingWeights:
        self.version = version
        return self

    def oldest(self) -> SleepingWeights:
        return self

    def completing(self, replica: SleepingWeights, *, version: int) -> AbstractContextManager[None]:
        return torch.no_grad()

    def take_gradient(self) -> Any:
        owned = [self._gradient[self._part]]
        taken = SimpleNamespace(flat=self._gradient, owned_views=owned, versions=list(self.versions))
        self.versions.clear()
        return taken


class NoUpdate:
    """In the place of `StageUpdate`."""

    def prepare(self, gradient: Any) -> None:
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


class SlowReduction:
    """A group whose reductions take a known time longer, as over a slow network: others go on meanwhile.

    Args:
        group: that does the work.
        seconds: that a reduction takes at least.
    """

    def __init__(self, group: Group, *, seconds: float) -> None:
        self.rank = group.rank
        self.size = group.size
        self.share = group.share
        self.spread = group.spread
        self._group = group
        self._seconds = seconds

    def reduce(self, flat: Tensor, bounds: Sequence[int], *, stage: int) -> Exchange[None]:
        done = time.perf_counter() + self._seconds
        reduction = self._group.reduce(flat, bounds, stage=stage)

        def wait() -> None:
            time.sleep(max(0.0, done - time.perf_counter()))
            reduction.wait()

        return Exchange(
            ready=lambda: time.perf_counter() >= done and reduction.ready(),
            wait=wait,
            take=reduction.take,
        )
