"""Weight prediction: compute with the weights expected when the gradient is applied.

Replicas are written as W - s D, where s is the horizon in updates and D the expected update:

    last-update    the optimizer's own last update, learning rate and decay included
                   (PipeOptim, arXiv 2312.00839)
    momentum       lr times the momentum (SpecTrain, arXiv 1809.02839)
    adam-moments   lr m' / (sqrt(v') + eps) with Adam's bias-corrected moments
                   (XPipe, arXiv 1911.04610)

With the last update and a horizon of 1 this is error feedback with c = 1 but for its start. Raw momentum is a
poor prediction for an optimizer that transforms it, as Muon does. It keeps no state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.corrections.base import Correction, PlainUpdate

FLAVOURS = ("last-update", "momentum", "adam-moments")


class WeightPrediction(PlainUpdate):
    """Writes replicas predicted `horizon` updates ahead. The master parameters take ordinary steps.

    After a gradient that was not finite the weights are written unchanged: the expected update is zero.

    Args:
        horizon: Updates to predict ahead, at least 0; usually the stage's delay.
        flavour: One of `FLAVOURS`.

    Raises:
        ValueError: An unknown flavour or a negative horizon.
    """

    def __init__(self, horizon: float, flavour: str = "last-update") -> None:
        if flavour not in FLAVOURS:
            raise ValueError(
                f"unknown flavour of weight prediction {flavour!r}; accepted: {', '.join(FLAVOURS)}"
            )
        if horizon < 0:
            raise ValueError(f"the horizon is {horizon:g}, accepted: at least 0")
        self.horizon = horizon
        self.flavour = flavour

    @torch.no_grad()
    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        """Take one step and write W - s D.

        Raises:
            ValueError: The optimizer does not keep the moments that the flavour needs.
        """
        current = list(master)
        if self.flavour == "last-update":
            predicted = [tensor.clone() for tensor in current]
            optimizer.step()
            torch._foreach_mul_(predicted, -self.horizon)
            torch._foreach_add_(predicted, current, alpha=1 + self.horizon)
        else:
            optimizer.step()
            direction = _momentum if self.flavour == "momentum" else _adam_direction
            rates = {p: group for group in optimizer.param_groups for p in group["params"]}
            steps = [direction(optimizer.state[p], rates[p]) for p in current]
            factors = [-self.horizon * rates[p]["lr"] for p in current]
            torch._foreach_mul_(steps, factors)
            predicted = list(torch._foreach_add(current, steps))
        torch._foreach_copy_(list(replica), predicted)


def _momentum(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    key = group.get("momentum_key")
    if not key or key not in state:
        raise ValueError(f"weight prediction by momentum: the rule {group.get('rule')!r} keeps no momentum")
    return state[key].clone()


def _adam_direction(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    if "exp_avg_sq" not in state or "betas" not in group:
        raise ValueError(f"weight prediction by Adam's moments: the rule {group.get('rule')!r} keeps none")
    beta1, beta2 = group["betas"]
    step = state["step"].double()  # stays on its device: a float would wait for it
    second = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    first: Tensor = state["exp_avg"] / (1 - beta1**step)
    return first.div_(second)


def of_stage(settings: Mapping[str, Any], *, delay: int, mismatch: int) -> Correction:
    return WeightPrediction(settings["reach"] * delay, settings["flavour"])
