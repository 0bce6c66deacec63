"""Build an optimizer by name for the parameters of one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from optimizers.catalogue import Value, check_options
from optimizers.composite import Composite
from optimizers.grouping import ParameterGroup, assign
from optimizers.muon import Muon
from optimizers.sgd import SGD

Groups = list[dict[str, Any]]
Settings = Mapping[str, Any]


def _adamw(groups: Groups, settings: Settings) -> torch.optim.Optimizer:
    betas = (settings["beta1"], settings["beta2"])
    return torch.optim.AdamW(groups, betas=betas, eps=settings["eps"], fused=True)


def _nadamw(groups: Groups, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.NAdam(
        groups,
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        momentum_decay=settings["momentum_decay"],
        decoupled_weight_decay=True,
        foreach=True,
    )


def _sgd(groups: Groups, settings: Settings) -> torch.optim.Optimizer:
    return SGD(groups, {"momentum": settings["momentum"], "nesterov": settings["nesterov"]})


def _muon(groups: Groups, settings: Settings) -> torch.optim.Optimizer:
    return Muon(groups, {key: settings[key] for key in ("momentum", "nesterov", "scale", "iteration")})


_RULES: Mapping[str, Callable[[Groups, Settings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "nadamw": _nadamw,
    "sgd": _sgd,
}


def build_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    name: str,
    lr: float,
    weight_decay: float,
    options: Mapping[str, Value],
) -> torch.optim.Optimizer:
    """The optimizer `name` over the parameters of one stage.

    Every group of its `param_groups` carries `lr` and `peak_lr` (a learning-rate schedule sets the first to
    a share of the second), `role`, `rule` and `param_names`. A stage without parameters for the main rule
    works. Gradients are only read.

    Args:
        parameters: By full name, such as `blocks.3.mlp.up.weight`; names decide the rule.
        name: One of `optimizers.NAMES`.
        lr: Peak learning rate.
        weight_decay: Decoupled; on matrices in blocks and on the head.
        options: What differs from the method's defaults.

    Raises:
        ValueError: Unknown optimizer or option, value out of range, no parameters, or one without a rule.
    """
    settings = check_options(name, options)
    assigned = assign(name, [(key, parameter.ndim) for key, parameter in parameters.items()])
    if not assigned:
        raise ValueError("no parameters to optimize")
    by_rule: dict[str, list[ParameterGroup]] = {}
    for group in assigned:
        by_rule.setdefault(group.rule, []).append(group)
    members = []
    for rule, groups in by_rule.items():
        peak = lr * float(settings.get("auxiliary_lr_ratio", 1.0)) if rule == "adamw" else lr
        members.append(
            _RULES[rule]([_torch_group(g, parameters, peak, weight_decay) for g in groups], settings)
        )
    return Composite(members)


def _torch_group(
    group: ParameterGroup, parameters: Mapping[str, torch.nn.Parameter], peak_lr: float, weight_decay: float
) -> dict[str, Any]:
    return {
        "params": [(name, parameters[name]) for name in group.names],
        "lr": peak_lr,
        "peak_lr": peak_lr,
        "weight_decay": weight_decay if group.decayed else 0.0,
        "role": group.role.value,
        "rule": group.rule,
    }
