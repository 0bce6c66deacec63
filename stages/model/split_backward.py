"""A backward in two halves: the gradient of the input first, those of the weight matrices later.

Zero-bubble schedules (arXiv 2401.10241, section 2) fill the bubble with the second half. A matrix's weight
gradient needs the layer's input and the gradient of its output, no weights; both are kept until the second
half. Gradients of norms and of the embedding, which are cheap, are computed in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.update.early_reduction import WholeGradients

WeightGradient = Callable[..., Tensor]
"""Computes the gradient of a weight, its first argument, from the tensors that were kept for it. It does not
read the weight's values, which may have changed."""


class DeferredGradients:
    """The weight gradients that one micro-batch's first half defers."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, WeightGradient, tuple[Tensor, ...]]] = []

    def leave(self, weight: Tensor, gradient: WeightGradient, *kept: Tensor) -> None:
        """Keep tensors that the gradient of `weight` follows from: it is `gradient(weight, *kept)`."""
        self._left.append((weight, gradient, kept))

    def kept(self) -> list[Tensor]:
        """The tensors that are held until the second half."""
        return [tensor for _, _, kept in self._left for tensor in kept]

    @torch.no_grad()
    def compute(self, whole: WholeGradients | None = None) -> None:
        """The second half: add every gradient to its parameter's `grad`.

        Args:
            whole: notified of each complete gradient, if this is the last half before the stage's update.
        """
        last_use = {id(weight): use for use, (weight, _, _) in enumerate(self._left)}
        if whole is not None:
            whole.leave([weight for weight, _, _ in self._left])
        for use, (weight, gradient, kept) in enumerate(self._left):
            assert weight.grad is not None
            weight.grad.add_(gradient(weight, *kept))
            if whole is not None and use == last_use[id(weight)]:
                whole.note(weight)
        self._left.clear()


_current: DeferredGradients | None = None


def deferred_now() -> DeferredGradients | None:
    """The object that forwards defer their weight gradients to; None: they are not deferred."""
    return _current


@contextmanager
def deferring(gradients: DeferredGradients | None) -> Iterator[None]:
    """Forwards in this context defer their weight gradients to `gradients`; None: nothing is deferred."""
    global _current
    before, _current = _current, gradients
    try:
        yield
    finally:
        _current = before


class Linear(nn.Linear):
    """A matrix without bias whose weight gradient can be deferred."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw initial values; on the meta device, where a stage is built for its shapes, there are none."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        if _current is None:
            return F.linear(input, self.weight)
        out = _DeferredLinear.apply(input, self.weight, _current)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, gradients: DeferredGradients) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.gradients = gradients
        # Recomputation returns another tensor for a saved one; its grad would be lost.
        ctx.parameter = weight
        return F.linear(given, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        given, weight = ctx.saved_tensors
        leave_matrix(ctx.gradients, ctx.parameter, given=given, gradient=gradient)
        return gradient @ weight, None, None


def leave_matrix(deferred: DeferredGradients, weight: Tensor, *, given: Tensor, gradient: Tensor) -> None:
    """Defer the gradient of a matrix, which follows from the layer's input and the gradient of its output."""
    deferred.leave(weight, _linear_gradient, given, gradient)


def _linear_gradient(_weight: Tensor, given: Tensor, gradient: Tensor) -> Tensor:
    """Of a matrix, from the layer's input and the gradient of its output."""
    return gradient.flatten(0, -2).t() @ given.flatten(0, -2)
