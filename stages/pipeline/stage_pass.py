"""One micro-batch in one stage: its forward, and its backward or the two halves of that.

The autograd graph of a forward keeps neither the stage's input nor its output. Both belong to messages.
Autograd saves what its backward needs, and that is often neither of them; a tensor that the executor kept
beside it would add to every micro-batch in flight.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from stages.data.documents import Documents
from stages.model.decoder import Stage
from stages.model.experts import Routing
from stages.model.gradients.split_backward import DeferredGradients, deferring
from stages.model.gradients.whole_gradients import WholeGradients


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
    """The values of `given` as the beginning of a graph whose backward leaves their gradient in `gradient`.

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


class Pass(Protocol):
    """A micro-batch whose forward has run."""

    is_split: bool
    """Whether the gradients of matrices wait for `weight_half`."""
    reports: bool
    """Whether the backward reports each gradient that is complete; if not, `whole` is None below."""

    def backward(self, gradient: Tensor | None, *, whole: WholeGradients | None = None) -> None:
        """Add the gradients of the parameters to their buffer.

        Args:
            gradient: of the output; None: it is the loss.
            whole: notified of each complete gradient.
        """

    def input_gradient(self) -> Tensor:
        """The gradient of the stage's input, contiguous; called once."""

    def weight_half(self, whole: WholeGradients | None = None) -> None:
        """Add the gradients that the backward deferred."""


class EagerPass:
    """A micro-batch that autograd runs, operator by operator."""

    reports = True

    def __init__(
        self, start: GradientEdge, input_gradient: InputGradient, deferred: DeferredGradients | None
    ) -> None:
        # Where the backward begins; the output itself is not kept.
        self._start = start
        self._input_gradient = input_gradient
        self._deferred = deferred
        self.is_split = deferred is not None

    def backward(self, gradient: Tensor | None, *, whole: WholeGradients | None = None) -> None:
        watching: AbstractContextManager[None] = nullcontext() if whole is None else whole.watching()
        with watching:
            if gradient is None:
                torch.autograd.backward(self._start)
                return
            # As `torch.autograd.backward`, which imports sympy (0.6 s) to compare shapes; the engine compares
            # them too.
            _engine_run_backward(
                (self._start,),
                (gradient,),
                False,  # retain_graph
                False,  # create_graph
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def input_gradient(self) -> Tensor:
        return self._input_gradient.take()

    def weight_half(self, whole: WholeGradients | None = None) -> None:
        assert self._deferred is not None
        self._deferred.compute(whole)


def run_stage(
    module: Stage,
    given: Tensor,
    *,
    targets: Tensor | None,
    loss_share: int,
    split: bool,
    documents: Documents | None = None,
    routing: Routing | None = None,
) -> tuple[Tensor, EagerPass]:
    """The forward of a stage: its output, detached, and what its backward needs.

    Args:
        module: the stage, on the replica of the micro-batch.
        given: tokens `(batch, context)` in the first stage, else activations `(batch, context, width)`.
        targets: token ids of the loss, in the last stage.
        loss_share: what the loss is divided by for its gradients.
        split: whether the backward has two halves.
        documents: as for `Stage.forward`.
        routing: likewise.
    """
    input_gradient = InputGradient()
    if given.is_floating_point():
        given = graph_input(given, input_gradient)
    deferred = DeferredGradients() if split else None
    with deferring(deferred):
        output = module(given, routing, targets=targets, documents=documents)
    start = output if targets is None else output / loss_share
    return output.detach(), EagerPass(get_gradient_edge(start), input_gradient, deferred)
