"""Gradient descent with momentum as an exponential average, and decoupled weight decay.

torch.optim.SGD sums gradients instead (M <- beta M + G) and couples the decay to the gradient. The average
is the form in which the stability of delayed updates is usually stated, and the one that Muon shares; with
the learning rate multiplied by 1 - momentum the two are equal, which is tested.
"""

from __future__ import annotations

import torch

from optimizers.rules.base import Group, ListOptimizer, States, Tensors, buffers, decay, ema_momentum


class SGD(ListOptimizer):
    """Gradient descent with an averaged momentum:

        M <- momentum M + (1 - momentum) G
        W <- (1 - lr weight_decay) W - lr M

    With `nesterov` the step follows (1 - momentum) G + momentum M. Keeps one tensor (M) per parameter,
    and none where `momentum` is 0. Group settings: `lr`, `weight_decay`, `momentum`, `nesterov`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        directions = gradients
        if group["momentum"] != 0:
            momenta = buffers(states, "momentum", parameters)
            directions = ema_momentum(momenta, gradients, group["momentum"], nesterov=group["nesterov"])
        decay(parameters, group)
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])
