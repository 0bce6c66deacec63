"""PipeDream-LR: a smaller learning rate where the delay is larger, at the start of training.

PipeMare's first technique (Yang et al., arXiv 1910.05124) and the baseline of that name in arXiv 2602.03515:
in update k (from 0) the learning rate is divided by tau^(1 - min(k / K, 1)), with tau the stage's delay. The
baseline counts updates from 1: in the first K updates its learning rate is larger by tau^(1 / K).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optimizers.corrections.base import Correction, PlainUpdate


def lr_discount(update: int, *, delay: float, anneal: int) -> float:
    """Factor on the learning rate of update number `update` (from 0).

    Args:
        update: Number of earlier updates, skipped ones included.
        delay: tau; no discount up to 1.
        anneal: K, updates over which the discount fades out.
    """
    remaining = 1 - min(update / anneal, 1.0) if anneal > 0 else 0.0
    return float(max(delay, 1.0) ** -remaining)


class LrDiscount:
    """Discounts the learning rate of the correction that it wraps. Keeps a counter."""

    def __init__(self, inner: Correction, *, delay: float, anneal: int) -> None:
        self._inner = inner
        self._delay = delay
        self._anneal = anneal
        self._updates = 0

    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        factor = lr_discount(self._updates, delay=self._delay, anneal=self._anneal)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        self._inner.update(optimizer=optimizer, master=master, replica=replica)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._updates += 1

    def skip(self, *, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        self._inner.skip(master=master, replica=replica)
        self._updates += 1

    def evaluation_weights(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._inner.evaluation_weights(master)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]
        self._inner.load_state_dict(state["inner"])


def of_stage(settings: Mapping[str, Any], *, delay: int, mismatch: int) -> Correction:
    return LrDiscount(PlainUpdate(), delay=delay, anneal=settings["anneal"])
