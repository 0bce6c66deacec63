"""Adan: Adam with a Nesterov look-ahead estimated from the difference of successive gradients.

Xie et al., "Adan: Adaptive Nesterov momentum algorithm for faster optimizing deep models" (arXiv
2208.06677). Betas are decay rates here (0.98 keeps 98 %); the paper's text uses their complements. Weight
decay is decoupled and applied first, as everywhere in this package; the paper also has a proximal form. Equal
to pytorch_optimizer's (tested), which is not used because it counts steps per group, where a checkpoint keyed
by parameter name cannot find them, and because its path without foreach overwrites the gradient.
"""

from __future__ import annotations

import math

import torch

from optimizers.rules.base import Group, ListOptimizer, States, Tensors, buffers, count_step, decay


class Adan(ListOptimizer):
    """Adan with decoupled weight decay. With D = G - G_previous (0 in the first step):

        M <- beta1 M + (1 - beta1) G
        V <- beta2 V + (1 - beta2) D
        N <- beta3 N + (1 - beta3) (G + beta2 D)^2
        W <- (1 - lr weight_decay) W - lr (M' + beta2 V') / (sqrt(N') + eps)

    where ' is the bias correction, a division by 1 - beta^t. Keeps four tensors (M, V, N, G_previous) per
    parameter. Group settings: `lr`, `weight_decay`, `beta1`, `beta2`, `beta3`, `eps`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        beta1, beta2, beta3 = group["beta1"], group["beta2"], group["beta3"]
        step = count_step(states)
        first, change, square, previous = (
            buffers(states, name, parameters) for name in ("first", "change", "square", "previous_gradient")
        )
        if step == 1:
            torch._foreach_copy_(previous, gradients)
        difference = list(torch._foreach_sub(gradients, previous))
        torch._foreach_copy_(previous, gradients)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_lerp_(change, difference, 1 - beta2)
        torch._foreach_mul_(difference, beta2)
        torch._foreach_add_(difference, gradients)
        torch._foreach_mul_(square, beta3)
        torch._foreach_addcmul_(square, difference, difference, 1 - beta3)

        denominator = list(torch._foreach_sqrt(square))
        torch._foreach_div_(denominator, math.sqrt(1 - beta3**step))
        torch._foreach_add_(denominator, group["eps"])
        decay(parameters, group)
        torch._foreach_addcdiv_(parameters, first, denominator, -group["lr"] / (1 - beta1**step))
        torch._foreach_addcdiv_(parameters, change, denominator, -group["lr"] * beta2 / (1 - beta2**step))
