"""A model whose blocks sleep a known time in the place of computing, with weights to exchange."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from stages.config.run_config import ModelConfig

VALUES, SECONDS = 0, 0.0
"""Weights of a block, and seconds of its forward, of the models that `parts` makes next."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        time.sleep(seconds)
        return given * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient * 1.0, torch.zeros(ctx.shape), None


class SleepingBlock(nn.Module):
    """Weights, and a sleep of `seconds`, twice as long backward."""

    def __init__(self, values: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(values))
        self.seconds = seconds

    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(given, self.weight, self.seconds)
        return out


def parts(config: ModelConfig, context: int) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    """For `model.factory`: a small embedding and head around the blocks."""
    embedding = nn.Embedding(config.vocab_size, config.width)
    blocks: list[nn.Module] = [SleepingBlock(VALUES, SECONDS) for _ in range(config.layers)]
    return embedding, blocks, nn.Linear(config.width, config.vocab_size, bias=False)
