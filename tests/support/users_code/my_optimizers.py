"""An optimizer of a user's own."""

import torch


class RowNormalized(torch.optim.Optimizer):
    """Momentum divided by the root mean square of each row's gradients."""

    def __init__(self, groups, *, lr, weight_decay, beta=0.9):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state, beta = parameter.grad, self.state[parameter], group["beta"]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                    state["square"] = torch.zeros_like(gradient[..., :1])
                state["momentum"].lerp_(gradient, 1 - beta)
                state["square"].lerp_(gradient.square().mean(-1, keepdim=True), 1 - beta)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["momentum"], state["square"].sqrt() + 1e-8, value=-group["lr"])
