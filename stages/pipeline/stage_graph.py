"""The autograd graph of a stage's forward, which keeps neither the stage's input nor its output.

Both belong to messages. Autograd saves what its backward needs, and that is often neither of them; a tensor
that the executor kept beside it would add to every micro-batch in flight.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class InputGradient:
    """Receives the gradient of a stage's input in the backward."""

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """Called by the backward."""
        self._value = gradient.contiguous()

    def take(self) -> Tensor:
        """The gradient, contiguous; forgets it."""
        value, self._value = self._value, None
        assert value is not None, "the output does not depend on the input"
        return value


def graph_input(given: Tensor, gradient: InputGradient) -> Tensor:
    """The same values as the beginning of a graph whose backward leaves their gradient in `gradient`.

    A leaf of the graph would be kept by the node that accumulates its gradient.
    """
    beginning = torch.empty(0, device=given.device, requires_grad=True)
    return cast(Tensor, _Input.apply(beginning, given, gradient))  # type: ignore[no-untyped-call]


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, beginning: Tensor, given: Tensor, gradient: InputGradient) -> Tensor:
        ctx.gradient = gradient
        return given.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradient.put(gradient)
        return None, None, None
