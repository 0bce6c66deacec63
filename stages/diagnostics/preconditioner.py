"""What an optimizer's state says about its next step: the step per unit of momentum, and the momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimizers.declaration import Scale
from stages.update.optimizer_step import StageState


def step_sizes(state: StageState) -> dict[str, Tensor] | None:
    """The diagonal D of u = D m by member: lr / (sqrt(v / (1 - beta2^t)) + eps) of Adam, lr of SGD.

    lr is that of the latest update; Adan's v is of the gradient with its look-ahead. 0 for the embedding: v
    of a token that has not occurred lately is near 0, so its D is huge, and has no meaning while the token
    does not occur. None where a rule has no such D, or no step has been taken.
    """
    sizes = {}
    for name, parameter, group in _owned(state):
        kept = state.update.optimizer.state.get(parameter, {}) if state.update.optimizer is not None else {}
        if group["role"] == "embedding":
            sizes[name] = torch.zeros_like(parameter, dtype=torch.float64)
            continue
        scale = _scale(group)
        if scale is None or (scale.second_moment and scale.second_moment not in kept):
            return None
        if not scale.second_moment:
            sizes[name] = torch.full_like(parameter, group["lr"], dtype=torch.float64)
        else:
            rate = _decay_rate(group, scale.rate)
            second = kept[scale.second_moment].double() / (1 - rate ** float(kept["step"]))
            sizes[name] = group["lr"] / (second.sqrt() + group["eps"])
    return sizes


def momenta(state: StageState) -> dict[str, Tensor] | None:
    """The averaged gradient m by member, of Adam with its correction for the start. None where a rule keeps
    none as it is, or no step has been taken."""
    averages = {}
    for name, parameter, group in _owned(state):
        kept = state.update.optimizer.state.get(parameter, {}) if state.update.optimizer is not None else {}
        key = group.get("momentum_key")
        if not key or key not in kept:
            return None
        averages[name] = kept[key].double()
        scale = _scale(group)
        if scale is not None and scale.second_moment:
            averages[name] /= 1 - _decay_rate(group, "beta1") ** float(kept["step"])
    return averages


def _scale(group: dict[str, Any]) -> Scale | None:
    return Scale(*group["momentum_scale"]) if group.get("momentum_scale") is not None else None


def _decay_rate(group: dict[str, Any], name: str) -> float:
    """Torch's optimizers keep their two as one setting."""
    rates = dict(zip(("beta1", "beta2"), group["betas"], strict=True)) if "betas" in group else group
    return float(rates[name])


def _owned(state: StageState) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Name, master copy and parameter group of each member that the data rank owns."""
    if state.update.optimizer is None:
        return []
    groups = {p: group for group in state.update.optimizer.param_groups for p in group["params"]}
    master = state.weights.master
    return [(name, p, groups[p]) for name, p in zip(master.names, master.parameters, strict=True)]
