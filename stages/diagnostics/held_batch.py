"""The loss of the whole model on a held batch, as a function of all its weights in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call

from stages.data.batches import Batches
from stages.data.documents import Documents
from stages.model.decoder import Stage, run_as_it_stands
from stages.update.optimizer_step import StageState

MICROBATCHES = 2
"""The most micro-batches of an evaluation that are held, its first."""


class HeldBatch:
    """The first micro-batches of an evaluation, and the stages that compute their loss.

    Args:
        stages: every stage of the model, in order.
        batches: source of the validation data.
        count: micro-batches of an evaluation.
        on_gradient: called when a gradient begins.
    """

    def __init__(
        self,
        stages: Sequence[StageState],
        batches: Batches,
        *,
        count: int,
        on_gradient: Callable[[], None],
    ) -> None:
        self._stages = stages
        self._held = [
            (*batches.validation(index, count=count), batches.validation_documents(index, count=count))
            for index in range(min(count, MICROBATCHES))
        ]
        self._on_gradient = on_gradient
        self._sizes = [size for state in stages for size in state.weights.sizes]
        self._shapes = [shape for state in stages for shape in state.weights.shapes.values()]
        self._names = [name for state in stages for name in state.weights.names]
        self.members = [name for state in stages for name in state.weights.member_names]
        """Names of all members, in the order of a vector's values."""
        self._device = batches.device

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Values by the names of members, as one float64 vector."""
        return torch.cat([values[name].detach().double().flatten() for name in self.members])

    @torch.enable_grad()
    def gradient(self, weights: Tensor) -> Tensor:
        """Gradient of the mean loss in nats per token, for all weights as a vector."""
        self._on_gradient()
        pieces = torch.split(weights.detach(), self._sizes)
        leaves = [
            piece.view(shape).requires_grad_() for piece, shape in zip(pieces, self._shapes, strict=True)
        ]
        by_name = dict(zip(self._names, leaves, strict=True))
        total = torch.zeros_like(weights)
        with _plain([state.weights.newest().module for state in self._stages]):
            for tokens, targets, documents in self._held:
                loss = self._loss(by_name, tokens, targets, documents)
                gradients = torch.autograd.grad(loss, leaves)
                total += torch.cat([gradient.flatten() for gradient in gradients])
        return total / len(self._held)

    def _loss(
        self, by_name: Mapping[str, Tensor], tokens: Tensor, targets: Tensor, documents: Documents | None
    ) -> Tensor:
        x = tokens
        last = len(self._stages) - 1
        for number, state in enumerate(self._stages):
            replica = state.weights.newest()
            own = {name: by_name[name] for name in state.weights.names}
            if state.tied is not None:
                own |= state.tied.weights(by_name)
            asked = {"targets": targets if number == last else None, "documents": documents}
            x = functional_call(replica.module, own, (x, replica.routing()), asked)
        return x


@contextmanager
def _plain(modules: Sequence[Stage]) -> Iterator[None]:
    """Within this context blocks are not compiled, nor recomputed: in backward that would read the modules'
    own weights."""
    kept = [module.run_block for module in modules]
    for module in modules:
        module.run_block = run_as_it_stands
    try:
        yield
    finally:
        for module, run_block in zip(modules, kept, strict=True):
            module.run_block = run_block
