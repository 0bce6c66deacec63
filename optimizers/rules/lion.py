"""Lion: the sign of an interpolation between momentum and gradient.

Chen et al., "Symbolic discovery of optimization algorithms" (arXiv 2302.06675). Equal to pytorch_optimizer's
(tested), which is not used because it would add a dependency for two lines of arithmetic.
"""

from __future__ import annotations

import torch

from optimizers.rules.base import Group, ListOptimizer, States, Tensors, buffers, decay


class Lion(ListOptimizer):
    """Steps along the sign of an interpolation of momentum and gradient:

        W <- (1 - lr weight_decay) W - lr sign(beta1 M + (1 - beta1) G)
        M <- beta2 M + (1 - beta2) G

    Every entry moves by lr, so lr is 3 to 10 times smaller than AdamW's, and weight decay larger by
    that factor.
    Keeps one tensor (M) per parameter. Group settings: `lr`, `weight_decay`, `beta1`, `beta2`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        momenta = buffers(states, "momentum", parameters)
        directions = torch._foreach_lerp(momenta, gradients, 1 - group["beta1"])
        torch._foreach_sign_(directions)
        decay(parameters, group)
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - group["beta2"])
