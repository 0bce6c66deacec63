"""AdamW with quasi-hyperbolic momentum: a step along a mixture of gradient and momentum.

Ma and Yarats, "Quasi-hyperbolic momentum and Adam for deep learning" (arXiv 1810.06801), QHAdam with a second
moment that is not mixed (nu2 = 1) and decoupled weight decay. Equal to pytorch_optimizer's (tested), which is
not used because it counts steps per group, where a checkpoint keyed by parameter name cannot find them.
"""

from __future__ import annotations

import math

import torch

from optimizers.rules.base import Group, ListOptimizer, States, Tensors, buffers, count_step, decay


class QHAdamW(ListOptimizer):
    """Adam along (1 - momentum_weight) G + momentum_weight M', with decoupled weight decay:

        M <- beta1 M + (1 - beta1) G
        V <- beta2 V + (1 - beta2) G^2
        W <- (1 - lr weight_decay) W - lr ((1 - momentum_weight) G + momentum_weight M') / (sqrt(V') + eps)

    where ' is the bias correction, a division by 1 - beta^t. A weight of 1 is AdamW, of beta1 Nesterov's
    momentum, of 0 RMSprop. Keeps two tensors (M, V) per parameter, as AdamW. Group settings: `lr`,
    `weight_decay`, `beta1`, `beta2`, `momentum_weight`, `eps`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        beta1, beta2, weight = group["beta1"], group["beta2"], group["momentum_weight"]
        step = count_step(states)
        first, square = (buffers(states, name, parameters) for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, gradients, gradients, 1 - beta2)
        directions = list(torch._foreach_mul(first, weight / (1 - beta1**step)))
        torch._foreach_add_(directions, gradients, alpha=1 - weight)
        denominator = list(torch._foreach_sqrt(square))
        torch._foreach_div_(denominator, math.sqrt(1 - beta2**step))
        torch._foreach_add_(denominator, group["eps"])
        decay(parameters, group)
        torch._foreach_addcdiv_(parameters, directions, denominator, -group["lr"])
