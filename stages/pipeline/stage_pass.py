"""One micro-batch in one stage: its forward, and its backward or the two halves of that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from stages.data.documents import Documents
from stages.model.decoder import Stage
from stages.model.gradients.split_backward import DeferredGradients, deferring
from stages.model.gradients.weight_gradient import WholeGradients
from stages.model.routing import Routing
from stages.pipeline.stage_graph import InputGradient, graph_input


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
