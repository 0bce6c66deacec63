"""Build an optimizer by name for the parameters of one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from optimizers.adan import Adan
from optimizers.basis_rotation import BasisRotation, stage_aware_intervals
from optimizers.catalogue import check_options
from optimizers.composite import Composite
from optimizers.grouping import ParameterGroup, assign
from optimizers.lion import Lion
from optimizers.mars import Mars
from optimizers.muon import Muon
from optimizers.normuon import NorMuon
from optimizers.options import Value
from optimizers.scion import ScionSign, ScionSpectral
from optimizers.sgd import SGD
from optimizers.soap import Soap

Groups = list[dict[str, Any]]
Settings = Mapping[str, Any]


def _adamw(groups: Groups, settings: Settings) -> torch.optim.Optimizer:
    # MARS has rates of its own for the vectors, which it leaves to AdamW.
    betas = (
        settings.get("vector_beta1", settings["beta1"]),
        settings.get("vector_beta2", settings["beta2"]),
    )
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


def _scion(groups: Groups, settings: Settings, *, rule: type[torch.optim.Optimizer], radius: str) -> Any:
    if settings["constrained"]:
        groups = [{**group, "weight_decay": 1.0} for group in groups]
    return rule(groups, {**settings, "radius": settings[radius]})


_RULES: Mapping[str, Callable[[Groups, Settings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adan": Adan,
    "basis-rotation": BasisRotation,
    "lion": Lion,
    "mars": Mars,
    "muon": Muon,
    "nadamw": _nadamw,
    "normuon": NorMuon,
    "scion-sign": partial(_scion, rule=ScionSign, radius="sign_radius"),
    "scion-spectral": partial(_scion, rule=ScionSpectral, radius="radius"),
    "sgd": SGD,
    "soap": Soap,
}
"""How each rule of the catalogue is built from groups and the method's settings."""


def build_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    name: str,
    lr: float,
    weight_decay: float,
    options: Mapping[str, Value],
    stage: int = 0,
    delays: Sequence[int] = (0,),
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
        stage: Which of the pipeline's stages the parameters are of.
        delays: Each stage's delay in updates; for methods that treat stages differently.

    Raises:
        ValueError: Unknown optimizer or option, value out of range, no parameters, or one without a rule.
    """
    settings = check_options(name, options)
    if settings.get("stage_aware"):
        settings["refresh_interval"] = stage_aware_intervals(int(settings["refresh_interval"]), delays)[stage]
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
