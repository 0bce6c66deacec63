"""The first half of a split backward, of a compiled block; and its whole backward in bfloat16.

A compiled backward is one piece that returns gradients and nothing else. So each matrix has two more inputs,
channels, which its forward does not read. As their gradients, backward returns what the gradient of the
matrix follows from: the gradient of the layer's output, and the layer's input. An autograd function outside
of what is compiled receives them. It defers their product (`stages.model.gradients.split_backward`), or adds
it to the matrix's float32 gradient (`stages.model.gradients.weight_gradient`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.model.gradients.split_backward import DeferredGradients, Linear, add_matrix

CHANNELS = ("output_channel", "input_channel")


class _Handing(torch.autograd.Function):
    """A matrix whose backward hands out the factors of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, output_channel: Tensor, input_channel: Tensor
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        return F.linear(given, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        given, weight = ctx.saved_tensors
        return gradient @ weight, None, gradient, given


class _HandingLinear(nn.Module):
    """In place of a `Linear`; its channels are buffers, so that `functional_call` can set them."""

    output_channel: Tensor
    input_channel: Tensor

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        for name in CHANNELS:
            self.register_buffer(name, torch.empty(0, device=weight.device))

    def forward(self, given: Tensor) -> Tensor:
        out = _Handing.apply(given, self.weight, self.output_channel, self.input_channel)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)


def matrices_of(block: nn.Module) -> list[str]:
    """Names of a block's matrices whose gradients can be deferred."""
    return [name for name, module in block.named_modules() if isinstance(module, Linear)]


def hand_out(block: nn.Module) -> list[str]:
    """Replace the matrices of a block by those with channels. Returns the names of all channels, in order."""
    names = matrices_of(block)
    for name in names:
        linear = cast(Linear, block.get_submodule(name))
        holder, _, attribute = name.rpartition(".")
        setattr(block.get_submodule(holder), attribute, _HandingLinear(cast(nn.Parameter, linear.weight)))
    return [f"{name}.{channel}" for name in names for channel in CHANNELS]


def channels(block: nn.Module, x: Tensor, deferred: DeferredGradients | None) -> tuple[Tensor, ...]:
    """What a compiled block takes as its channels; they take no memory.

    Args:
        block: with the parameters whose gradients are handed out.
        x: its input, `(batch, context, width)`.
        deferred: receives the gradients; None: they are added in this backward.
    """
    weights = [cast(Linear, block.get_submodule(name)).weight for name in matrices_of(block)]
    out: tuple[Tensor, ...] = _Channels.apply(deferred, x, *weights)  # type: ignore[no-untyped-call]
    return out


class _Channels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, deferred: DeferredGradients | None, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.deferred, ctx.parameters = deferred, weights
        nothing = x.new_empty(1)
        return tuple(
            nothing.expand(*x.shape[:-1], features) for weight in weights for features in weight.shape
        )

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[None, ...]:
        for weight, gradient, given in zip(ctx.parameters, factors[::2], factors[1::2], strict=True):
            add_matrix(ctx.deferred, weight, given=given, gradient=gradient)
        return (None, None, *(None for _ in ctx.parameters))
