"""An exponential moving average of a stage's weights (`train.ema_decay`).

    a_t = (1 - d) / (1 - d^t) * sum over k = 1..t of d^(t - k) w_k

w_k are the weights that are evaluated after the k-th update that is applied. The sum of the factors is 1, as
in Adam's estimates of moments (arXiv 1412.6980, section 3): the initial weights have no share in it. With
d_t = d (1 - d^(t - 1)) / (1 - d^t) that is a_t = d_t a_(t - 1) + (1 - d_t) w_t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.corrections.base import Correction


class AveragedWeights:
    """A correction that performs another one and averages the weights, one tensor per parameter.

    The weights that the pipeline computes with are those of the other correction. A skipped update leaves the
    average as it is.

    Args:
        correction: the other one.
        decay: d, in (0, 1).
    """

    def __init__(self, correction: Correction, *, decay: float) -> None:
        self.correction = correction
        self._decay = decay
        self._average: list[Tensor] = []
        """Empty before the first update."""
        self._updates = 0
        """Updates in the average."""

    @torch.no_grad()
    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        self.correction.update(optimizer=optimizer, master=master, replica=replica)
        weights = list(self.correction.evaluation_weights(master))
        self._updates += 1
        if self._average:
            d, t = self._decay, self._updates
            torch._foreach_lerp_(self._average, weights, (1 - d) / (1 - d**t))
        else:
            self._average = [tensor.detach().clone() for tensor in weights]

    def skip(self, *, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        self.correction.skip(master=master, replica=replica)

    def evaluation_weights(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.correction.evaluation_weights(master)

    def average(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        """The average; before the first update the weights themselves. Read only."""
        return self._average or self.evaluation_weights(master)

    def state_dict(self) -> dict[str, Any]:
        return self.correction.state_dict() | {"average": list(self._average), "averaged": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.correction.load_state_dict(state)
        average, updates = state["average"], state["averaged"]
        if updates < 0 or (updates > 0) != bool(average):
            raise ValueError(f"an average of {updates} updates")
        self._average, self._updates = list(average), updates
