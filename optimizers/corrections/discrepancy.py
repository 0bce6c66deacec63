"""PipeMare's discrepancy correction: a backward near the weights that its forward used, without a stash.

Yang et al. (arXiv 1910.05124), technique 2. An unstashed schedule runs a micro-batch's backward with newer
weights than its forward. An average velocity v of the weights, v <- gamma v + (1 - gamma) (W_new - W_old),
estimates the weights `mismatch` updates ago: W - mismatch v. gamma = memory^(1 / mismatch), so that
the average reaches back about as far as the mismatch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.corrections.base import Correction


class DiscrepancyCorrection:
    """The ordinary update, and estimated weights for backwards whose forward was `mismatch` updates ago.

    Keeps one tensor (v) per parameter.

    Args:
        mismatch: Updates between a micro-batch's forward and its backward at this stage, above 0.
        memory: Share of v that is left after `mismatch` updates, between 0 and 1.

    Raises:
        ValueError: An argument outside its range.
    """

    def __init__(self, mismatch: float, memory: float = 0.135) -> None:
        if mismatch <= 0:
            raise ValueError(
                f"the mismatch is {mismatch:g}: forward and backward use the same weights already"
            )
        if not 0 < memory < 1:
            raise ValueError(f"memory is {memory:g}, accepted: above 0 and below 1")
        self._gamma = memory ** (1 / mismatch)
        self._velocities: list[Tensor] = []

    @torch.no_grad()
    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        current = list(master)
        moved = [tensor.clone() for tensor in current]
        optimizer.step()
        torch._foreach_sub_(moved, current)
        torch._foreach_neg_(moved)
        if not self._velocities:
            self._velocities = [torch.zeros_like(tensor) for tensor in current]
        torch._foreach_lerp_(self._velocities, moved, 1 - self._gamma)
        torch._foreach_copy_(list(replica), current)

    @torch.no_grad()
    def skip(self, *, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        torch._foreach_mul_(self._velocities, self._gamma)
        torch._foreach_copy_(list(replica), list(master))

    @torch.no_grad()
    def backward_weights(self, master: Sequence[Tensor], out: Sequence[Tensor], mismatch: int) -> None:
        """Write into `out` the estimated weights of a forward that ran `mismatch` updates ago."""
        estimated = list(master)
        if self._velocities:
            estimated = list(torch._foreach_add(estimated, self._velocities, alpha=-mismatch))
        torch._foreach_copy_(list(out), estimated)

    def evaluation_weights(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        return master

    def state_dict(self) -> dict[str, Any]:
        return {"velocities": [tensor.clone() for tensor in self._velocities]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._velocities = [tensor.clone() for tensor in state["velocities"]]


def of_stage(settings: Mapping[str, Any], *, delay: int, mismatch: int) -> Correction:
    return DiscrepancyCorrection(mismatch, settings["memory"])
