"""Records the updates of a stage, so that consecutive ones can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.corrections.base import Correction


class RecordedUpdates:
    """A correction that performs another one and keeps the latest update: one tensor per parameter.

    An update is the change of the evaluated weights, u = y - y', weight decay included. Checkpoints hold it,
    so that a resumed run compares the same updates.
    """

    def __init__(self, correction: Correction) -> None:
        self.correction = correction
        self.latest: list[Tensor] = []
        """The latest update; empty before the first."""
        self.products: Tensor | None = None
        """u . u_previous, u . u, u_previous . u_previous, float64; None until an update follows another."""

    @torch.no_grad()
    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        before = [weights.clone() for weights in self.correction.evaluation_weights(master)]
        self.correction.update(optimizer=optimizer, master=master, replica=replica)
        self._note(before, master)

    @torch.no_grad()
    def skip(self, *, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        before = [weights.clone() for weights in self.correction.evaluation_weights(master)]
        self.correction.skip(master=master, replica=replica)
        self._note(before, master)

    def _note(self, before: list[Tensor], master: Sequence[Tensor]) -> None:
        torch._foreach_sub_(before, list(self.correction.evaluation_weights(master)))
        if self.latest:
            pairs = ((before, self.latest), (before, before), (self.latest, self.latest))
            self.products = torch.stack([_dot(first, second) for first, second in pairs])
        self.latest = before

    def evaluation_weights(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.correction.evaluation_weights(master)

    def state_dict(self) -> dict[str, Any]:
        return self.correction.state_dict() | {"latest_update": [tensor.clone() for tensor in self.latest]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.correction.load_state_dict(state)
        self.latest = [tensor.clone() for tensor in state.get("latest_update", [])]
        self.products = None


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    products = [(a.double() * b.double()).sum() for a, b in zip(first, second, strict=True)]
    return torch.stack(products).sum()
