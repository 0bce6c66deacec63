"""Build an optimizer by name for the parameters of one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimizers.catalogue import check_options, method_named
from optimizers.custom import build_custom
from optimizers.declaration import Rule
from optimizers.grouping import ParameterGroup, Role, assign, role_of
from optimizers.growth import Growth
from optimizers.named import import_named, is_custom
from optimizers.options import Value
from optimizers.rules.base import EagerOptimizer
from optimizers.rules.basis_rotation import stage_aware_intervals


def build_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    name: str,
    lr: float,
    weight_decay: float,
    options: Mapping[str, Value],
    roles: Mapping[str, Role] | None = None,
    stage: int = 0,
    delays: Sequence[int] = (0,),
    growth: Growth = Growth(),  # noqa: B008
) -> torch.optim.Optimizer:
    """The optimizer `name` for the parameters of one stage.

    Its `param_groups` have `lr` and `peak_lr` (the learning-rate schedule sets the first to a share of the
    second). A stage may have no parameters for the main rule. Gradients are only read.

    Args:
        parameters: By full name, such as `blocks.3.mlp.up.weight`.
        name: One of `optimizers.NAMES`, or `package.module:name` for a custom one.
        lr: Peak learning rate.
        weight_decay: Decoupled; on matrices in blocks and on the head.
        options: Values of options that differ from the defaults.
        roles: Of the parameters, by name; None: by their names and dimensions.
        stage: Number of the stage.
        delays: Each stage's delay in updates, for options that depend on it.
        growth: The model's size over that of the model whose learning rate this is.

    Raises:
        ValueError: Unknown optimizer or option, value out of range, no parameters, one without a rule, or a
            rule that cannot follow the size.
    """
    settings = check_options(name, options)
    if settings.get("stage_aware"):
        settings["refresh_interval"] = stage_aware_intervals(int(settings["refresh_interval"]), delays)[stage]
    if roles is None:
        roles = {key: role_of(key, parameter.ndim) for key, parameter in parameters.items()}
    assigned = assign(name, {key: roles[key] for key in parameters})
    if not assigned:
        raise ValueError("no parameters to optimize")
    if is_custom(name):
        groups = [_torch_group(group, parameters, lr, weight_decay) for group in assigned]
        return build_custom(name, groups, lr=lr, weight_decay=weight_decay, options=options)
    by_rule: dict[Rule, list[dict[str, Any]]] = {}
    for group in assigned:
        rule = method_named(name).rule(group.role.value)
        peak = lr * float(settings.get("auxiliary_lr_ratio", 1.0)) if rule.auxiliary else lr
        factor = growth.lr_factor(rule, group.role.value, settings)
        torch_group = _torch_group(group, parameters, peak * factor, weight_decay / factor)
        if "eps" in settings and growth != Growth():
            torch_group["eps"] = float(settings["eps"]) * growth.epsilon_factor(group.role.value)
        torch_group["momentum_key"] = rule.momentum
        by_rule.setdefault(rule, []).append(torch_group)
    return Composite([import_named(rule.factory)(groups, settings) for rule, groups in by_rule.items()])


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


class Composite(EagerOptimizer):
    """Steps its members in turn, each on its own parameters.

    Groups and state are shared with the members, so that `param_groups`, `state_dict` and `load_state_dict`
    work as in any optimizer, and a learning rate set in a group reaches the member that owns it.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self._members = tuple(members)
        super().__init__([group for member in members for group in member.param_groups], {})
        self._share()

    def _share(self) -> None:
        first = 0
        for member in self._members:
            count = len(member.param_groups)
            member.param_groups = self.param_groups[first : first + count]
            member.state = self.state
            first += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every member.

        Raises:
            ValueError: A closure was given; the pipeline computes gradients elsewhere.
        """
        if closure is not None:
            raise ValueError("this optimizer takes no closure")
        for member in self._members:
            member.step()
