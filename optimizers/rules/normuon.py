"""NorMuon: Muon with each row of the update divided by the running root mean square of that row's updates.

Li et al., "NorMuon: Making Muon more efficient and scalable" (arXiv 2510.05491), Algorithm 1. Rows are
output neurons. pytorch_optimizer's is not used because it orthogonalizes in bfloat16 on every device and, on
its path without foreach, overwrites the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.rules.base import Group, ListOptimizer, States, Tensors, buffers, decay, ema_momentum
from optimizers.rules.muon import orthogonal_directions, update_scale

_SMALLEST = 1e-30
"""Norm of a matrix of zeros, such as of an expert without a token: its step is zero."""


class NorMuon(ListOptimizer):
    """Muon with a second moment for each row. With O the orthogonalized direction of Muon:

        v <- row_beta2 v + (1 - row_beta2) mean over columns of O^2
        O' = O / (sqrt(v) + row_eps)
        W <- (1 - lr weight_decay) W - lr size O' / ||O'||

    With `scale` match-rms, size is 0.2 sqrt(rows columns), as in the paper: the root mean square of a step is
    0.2 lr. With original it is ||O|| sqrt(max(1, rows / columns)), as in the authors' code: the step is as
    long as Muon's. Keeps one tensor (M) per parameter and one number (v) per row. Group settings: `lr`,
    `weight_decay`, `momentum`, `nesterov`, `row_beta2`, `row_eps`, `scale`, `iteration`, `precision`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        momenta = buffers(states, "momentum", parameters)
        directions = ema_momentum(momenta, gradients, group["momentum"], nesterov=group["nesterov"])
        squares = buffers(states, "row_square", [parameter[:, :1] for parameter in parameters])
        decay(parameters, group)
        for positions, steps in orthogonal_directions(directions, group):
            chosen = [squares[i] for i in positions]
            torch._foreach_lerp_(
                chosen, list(steps.square().mean(-1, keepdim=True).unbind()), 1 - group["row_beta2"]
            )
            rows, columns = steps.shape[-2:]
            if group["scale"] == "match-rms":
                sizes: float | Tensor = 0.2 * (rows * columns) ** 0.5
            else:
                sizes = _norms(steps) * update_scale(rows, columns, "original")
            steps = steps / (torch.stack(chosen).sqrt() + group["row_eps"])
            steps *= sizes / _norms(steps).clamp_min(_SMALLEST)
            torch._foreach_add_([parameters[i] for i in positions], list(steps.unbind()), alpha=-group["lr"])


def _norms(matrices: Tensor) -> Tensor:
    """The Frobenius norm of each matrix, of shape (count, 1, 1)."""
    return torch.stack(torch._foreach_norm(matrices.unbind())).reshape(-1, 1, 1)
