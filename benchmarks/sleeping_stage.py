"""A stage that sleeps a known time in the place of computing, so that few cores can time many ranks."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stages.update import UpdateResult

SHAPE = (1, 8, 64)
"""Of every activation."""


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
    """In the place of `WeightVersions`: every version is the same sleeping module."""

    def __init__(self, seconds: float) -> None:
        self.module = SleepingStage(seconds)
        self.version = 0
        self.pending_backwards = 0
        self.versions: list[int] = []

    @property
    def gathering(self) -> SleepingWeights:
        return self

    def holding(self, version: int) -> SleepingWeights:
        self.version = version
        return self

    def take_gradient(self) -> Any:
        taken = SimpleNamespace(views=[torch.ones(1)], versions=list(self.versions))
        self.versions.clear()
        return taken


class NoUpdate:
    """In the place of `StageUpdate`."""

    def prepare(self, gradient: Any) -> None:
        pass

    def at_backward(self, replica: Any, *, mismatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(self, gradient: Any, *, version: int, step: int, squared_norm: Tensor | None) -> UpdateResult:
        return UpdateResult(lr=0.0, grad_norm=None, skipped=False)


class EmulatedBatches:
    """In the place of `Batches`."""

    def tokens(self, microbatch: int) -> Tensor:
        return torch.zeros(SHAPE)

    def targets(self, microbatch: int) -> Tensor:
        return torch.zeros(SHAPE[:2], dtype=torch.long)
