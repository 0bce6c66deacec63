"""Scion: steps of fixed size in a norm that suits the layer.

Pethick et al., "Training deep learning models with norm-constrained LMOs" (arXiv 2502.07529). Matrices in
blocks move in the spectral norm, the head and the embedding in the largest entry. Learning rates are of the
order of 2^-12 with the default radii. pytorch_optimizer's is not used because it orthogonalizes in bfloat16
on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from optimizers.rules.base import Group, ListOptimizer, States, Tensors, buffers, decay, ema_momentum
from optimizers.rules.muon import orthogonal_directions


class _Scion(ListOptimizer):
    def __init__(self, groups: list[Group], settings: Mapping[str, Any]) -> None:
        """With `constrained`, weight decay is 1: a step then is a Frank-Wolfe step in the norm's ball."""
        if settings["constrained"]:
            groups = [{**group, "weight_decay": 1.0} for group in groups]
        super().__init__(groups, settings)


class ScionSpectral(_Scion):
    """Steps of a fixed size in the spectral norm:

        M <- momentum M + (1 - momentum) G
        W <- (1 - lr weight_decay) W - lr radius sqrt(rows / columns) orthogonalize(M)

    Keeps one tensor (M) per parameter. Group settings: `lr`, `weight_decay`, `momentum`, `radius`,
    `iteration`, `precision`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        momenta = buffers(states, "momentum", parameters)
        directions = ema_momentum(momenta, gradients, group["momentum"], nesterov=False)
        decay(parameters, group)
        for positions, steps in orthogonal_directions(directions, group):
            rows, columns = steps.shape[-2:]
            factor = -group["lr"] * group["radius"] * math.sqrt(rows / columns)
            torch._foreach_add_([parameters[i] for i in positions], list(steps.unbind()), alpha=factor)


class ScionSign(_Scion):
    """Steps of a fixed size in the largest entry:

        M <- momentum M + (1 - momentum) G
        W <- (1 - lr weight_decay) W - lr sign_radius / columns sign(M)

    Columns are the head's inputs; the embedding has as many. Keeps one tensor (M) per parameter. Group
    settings: `lr`, `weight_decay`, `momentum`, `sign_radius`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        momenta = buffers(states, "momentum", parameters)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        decay(parameters, group)
        for parameter, momentum in zip(parameters, momenta, strict=True):
            parameter.add_(momentum.sign(), alpha=-group["lr"] * group["sign_radius"] / parameter.shape[1])
