"""A backward in two halves: the gradient of the input first, those of the weight matrices later.

Zero-bubble schedules (arXiv 2401.10241, section 2) fill the bubble with the second half. A matrix's weight
gradient needs the layer's input and the gradient of its output, no weights; both are kept until the second
half. Gradients of norms and of the embedding, which are cheap, are computed in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.model.gradients.weight_gradient import add_product, is_added_in_backward
from stages.model.gradients.whole_gradients import WholeGradients

AddGradient = Callable[..., None]
"""Adds the gradients of weights to its first arguments, their `grad`, from tensors that were kept."""


class DeferredGradients:
    """The weight gradients that one micro-batch's first half defers."""

    def __init__(self) -> None:
        self._left: list[tuple[Sequence[Tensor], AddGradient, tuple[Tensor, ...]]] = []

    def leave(self, weights: Sequence[Tensor], add: AddGradient, *kept: Tensor) -> None:
        """Keep tensors that gradients follow from: `add(*(weight.grad for weight in weights), *kept)`."""
        # Without their graph, which holds this object: if no second half came, none would ever go.
        self._left.append((weights, add, tuple(tensor.detach() for tensor in kept)))

    def kept(self) -> list[Tensor]:
        """The tensors that are held until the second half."""
        return [tensor for _, _, kept in self._left for tensor in kept]

    @torch.no_grad()
    def compute(self, whole: WholeGradients | None = None) -> None:
        """The second half: add every gradient to its parameter's `grad`.

        Args:
            whole: notified of each complete gradient, if this is the last half before the stage's update.
        """
        last_use = {id(weight): use for use, (weights, _, _) in enumerate(self._left) for weight in weights}
        if whole is not None:
            whole.leave([weight for weights, _, _ in self._left for weight in weights])
        for use, (weights, add, kept) in enumerate(self._left):
            add(*(weight.grad for weight in weights), *kept)
            for weight in weights:
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
        if _current is None and not is_added_in_backward(self.weight):
            return F.linear(input, self.weight)
        out = _Linear.apply(input, self.weight, _current)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)


class _Linear(torch.autograd.Function):
    """A matrix whose gradient autograd does not see."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, deferred: DeferredGradients | None) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.deferred = deferred
        # Recomputation returns another tensor for a saved one; its grad would be lost.
        ctx.parameter = weight
        return F.linear(given, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        given, weight = ctx.saved_tensors
        add_matrix(ctx.deferred, ctx.parameter, given=given, gradient=gradient)
        return gradient @ weight, None, None


def add_matrix(
    deferred: DeferredGradients | None, weight: Tensor, *, given: Tensor, gradient: Tensor
) -> None:
    """Add the gradient of a matrix to its `grad`, or defer it.

    Args:
        deferred: what it is deferred to; None: it is added now.
        weight: the parameter.
        given: the layer's input.
        gradient: of the layer's output.
    """
    if deferred is not None:
        deferred.leave([weight], _add_linear, gradient, given)
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    _add_linear(weight.grad, gradient, given)


def _add_linear(total: Tensor, gradient: Tensor, given: Tensor) -> None:
    add_product(total, gradient.flatten(0, -2), given.flatten(0, -2))
