"""MARS in its AdamW form: Adam on a gradient that is corrected by its own change.

Yuan et al., "MARS: Unleashing the power of variance reduction for training large models" (arXiv
2411.10438), the approximate variant, which reuses the last step's gradient instead of evaluating a second
one.

Vectors go to AdamW with decay rates of their own (`vector_beta1`, `vector_beta2`), as in the authors' code.
There they also have a learning rate of their own and a weight decay of 0.1; here they share the rate and are
not decayed, as under every other optimizer, so that arms differ in nothing else.
"""

from __future__ import annotations

import math

import torch

from optimizers.rules.base import Group, ListOptimizer, States, Tensors, buffers, count_step, decay


class Mars(ListOptimizer):
    """Adam with decoupled weight decay on a corrected gradient C:

        C = G + gamma beta1 / (1 - beta1) (G - G_previous), divided by its norm where that is above 1
        M <- beta1 M + (1 - beta1) C
        V <- beta2 V + (1 - beta2) C^2
        W <- (1 - lr weight_decay) W - lr M' / (sqrt(V') + eps)

    where ' is the bias correction, a division by 1 - beta^t. The norm is that of each tensor; G_previous
    starts at 0. Keeps three tensors (M, V, G_previous) per parameter. Group settings: `lr`, `weight_decay`,
    `beta1`, `beta2`, `gamma`, `eps`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        beta1, beta2 = group["beta1"], group["beta2"]
        step = count_step(states)
        first, square, previous = (
            buffers(states, name, parameters) for name in ("first", "square", "previous_gradient")
        )
        corrected = list(torch._foreach_sub(gradients, previous))
        torch._foreach_mul_(corrected, group["gamma"] * beta1 / (1 - beta1))
        torch._foreach_add_(corrected, gradients)
        torch._foreach_div_(corrected, list(torch._foreach_clamp_min(torch._foreach_norm(corrected), 1.0)))
        torch._foreach_copy_(previous, gradients)

        torch._foreach_lerp_(first, corrected, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, corrected, corrected, 1 - beta2)
        denominator = list(torch._foreach_sqrt(square))
        torch._foreach_div_(denominator, math.sqrt(1 - beta2**step))
        torch._foreach_add_(denominator, group["eps"])
        decay(parameters, group)
        torch._foreach_addcdiv_(parameters, first, denominator, -group["lr"] / (1 - beta1**step))
