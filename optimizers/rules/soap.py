"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Vyas et al., "SOAP: Improving and stabilizing Shampoo using Adam" (arXiv 2409.11321). As in the authors'
code, the first gradient only sets the bases, and the bases of a step do not include that step's gradient.
Weight decay is applied before the step, as everywhere in this package (theirs is applied after it).
pytorch_optimizer's is not used because it processes matrices one by one and rounds a float64 basis to
float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimizers.rules.base import Group, ListOptimizer, State, as_batch, buffers, by_shape, count_step, decay
from optimizers.rules.eigenbasis import eigenbasis, refresh, reorder, rotate, rotate_back, stacked, store


class Soap(ListOptimizer):
    """Adam in the eigenbases Q_L, Q_R. With t counting steps after the first gradient:

        M <- beta1 M + (1 - beta1) G
        V <- beta2 V + (1 - beta2) (Q_L^T G Q_R)^2
        W <- (1 - lr weight_decay) W - lr k Q_L (Q_L^T M Q_R / (sqrt(V) + eps)) Q_R^T
        L <- beta2 L + (1 - beta2) G G^T
        R <- beta2 R + (1 - beta2) G^T G

    where k = sqrt(1 - beta2^t) / (1 - beta1^t) is Adam's bias correction, and every `refresh_interval` steps
    one step of power iteration moves the bases towards the eigenbases of L and R.

    M is kept rotated, as Q_L^T M Q_R, and rotated again when the bases are refreshed, not in every step.
    Keeps M, V, L, R, Q_L and Q_R per matrix: 2 rows columns + 2 rows^2 + 2 columns^2 values. Group settings:
    `lr`, `weight_decay`, `beta1`, `beta2`, `eps`, `refresh_interval`.
    """

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group
    ) -> None:
        step = count_step(states) - 1
        if step > 0:
            decay(parameters, group)
        for positions in by_shape(parameters):
            batch = as_batch([gradients[i] for i in positions])
            chosen = [states[i] for i in positions]
            if step > 0:
                steps = _rotated_adam(batch, chosen, group)
                factor = math.sqrt(1 - group["beta2"] ** step) / (1 - group["beta1"] ** step)
                torch._foreach_add_(
                    [parameters[i] for i in positions], list(steps.unbind()), alpha=-group["lr"] * factor
                )
            _accumulate(batch, chosen, group["beta2"])
            if step == 0:
                for side in ("left", "right"):
                    store(chosen, f"{side}_basis", eigenbasis(stacked(chosen, side)))
            elif step % group["refresh_interval"] == 0:
                _refresh(chosen)


def _rotated_adam(batch: Tensor, states: list[State], group: Group) -> Tensor:
    left, right = stacked(states, "left_basis"), stacked(states, "right_basis")
    rotated = rotate(batch, left, right)
    like = list(rotated.unbind())
    first, square = buffers(states, "rotated_first", like), buffers(states, "square", like)
    torch._foreach_lerp_(first, like, 1 - group["beta1"])
    torch._foreach_lerp_(square, list(rotated.square().unbind()), 1 - group["beta2"])
    return rotate_back(as_batch(first) / (as_batch(square).sqrt() + group["eps"]), left, right)


def _accumulate(batch: Tensor, states: list[State], beta: float) -> None:
    for side, grams in (("left", torch.bmm(batch, batch.mT)), ("right", torch.bmm(batch.mT, batch))):
        torch._foreach_lerp_(buffers(states, side, list(grams.unbind())), list(grams.unbind()), 1 - beta)


def _refresh(states: list[State]) -> None:
    bases = {side: stacked(states, f"{side}_basis") for side in ("left", "right")}
    momentum = rotate_back(stacked(states, "rotated_first"), bases["left"], bases["right"])
    square = stacked(states, "square")
    for side, axis in (("left", -2), ("right", -1)):
        bases[side], order = refresh(stacked(states, side), bases[side])
        square = reorder(square, order, axis)
        store(states, f"{side}_basis", bases[side])
    store(states, "square", square)
    store(states, "rotated_first", rotate(momentum, bases["left"], bases["right"]))
