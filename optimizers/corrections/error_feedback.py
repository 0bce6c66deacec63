"""Error feedback (arXiv 2606.30634): the next update pays back the error that the delay of the last one made.

    x' = x - u - c (u - u_previous)

u is the optimizer's whole update: after momentum, preconditioning and learning rate, decoupled weight decay
included. The first update is ordinary. A skipped update counts as u = 0.

With y = x + c u_previous this is y' = y - u, an ordinary step, while the pipeline computes with x' = y' + c
(y' - y). The master parameters can therefore hold y without a history (`LookAheadErrorFeedback`);
`BufferedErrorFeedback` keeps x and u_previous as in the formula and is the reference in the tests. Both forms
evaluate and save y.

Weight decay applies to y (`decay_at="y"`, the default), or to x, the weights that the pipeline computes with
(`decay_at="x"`), which only the buffered form has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.corrections.base import Correction, PlainUpdate, check_form

PART = 2**20
"""Values of a parameter that are copied at once."""


class LookAheadErrorFeedback(PlainUpdate):
    """Error feedback without a history: the master parameters hold y, replicas get y' + c (y' - y).

    Keeps one flag. During a step, the output replica holds the old y, or a temporary copy does if the
    replica's type is narrower than the master's.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._started = False

    @torch.no_grad()
    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        current, written = list(master), list(replica)
        exact = all(new.dtype == old.dtype for new, old in zip(written, current, strict=True))
        old = written if exact else [torch.empty_like(tensor) for tensor in current]
        torch._foreach_copy_(old, current)
        optimizer.step()
        c = self.coefficient
        if self._started:
            torch._foreach_mul_(old, -c)
            torch._foreach_add_(old, current, alpha=1 + c)
            torch._foreach_copy_(written, old)
        else:
            # The ordinary step leaves x' = y - u in the master, which then becomes y' = x' + c u.
            torch._foreach_sub_(old, current)
            for tensors in zip(current, old, written, strict=True):
                # By parts, so that the copies stay small: `update` may be `output`.
                ends = tuple(range(PART, tensors[0].numel(), PART))
                parts = (torch.tensor_split(each.view(-1), ends) for each in tensors)
                for weights, update, output in zip(*parts, strict=True):
                    first = weights.clone()
                    weights.add_(update, alpha=c)
                    output.copy_(first)
            self._started = True

    def state_dict(self) -> dict[str, Any]:
        return {"form": "look-ahead", "started": self._started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_form(state, "look-ahead")
        self._started = state["started"]


class BufferedErrorFeedback:
    """Error feedback as in its formula: the master parameters hold x, and the previous update is kept, one
    tensor per parameter."""

    def __init__(self, coefficient: float, decay_at: str = "y") -> None:
        self.coefficient = coefficient
        self.decay_at = decay_at
        self._previous: list[Tensor] = []

    @torch.no_grad()
    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        x, c = list(master), self.coefficient
        old = [tensor.clone() for tensor in x]
        if not self._previous:
            optimizer.step()
            self._previous = list(torch._foreach_sub(old, x))
        else:
            if self.decay_at == "y":
                torch._foreach_add_(x, self._previous, alpha=c)
            start = [tensor.clone() for tensor in x]
            optimizer.step()
            update = list(torch._foreach_sub(start, x))
            torch._foreach_copy_(x, old)
            torch._foreach_add_(x, update, alpha=-(1 + c))
            torch._foreach_add_(x, self._previous, alpha=c)
            self._previous = update
        torch._foreach_copy_(list(replica), x)

    @torch.no_grad()
    def skip(self, *, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        x = list(master)
        if self._previous:
            torch._foreach_add_(x, self._previous, alpha=self.coefficient)
            torch._foreach_zero_(self._previous)
        torch._foreach_copy_(list(replica), x)

    def evaluation_weights(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._previous:
            return master
        return torch._foreach_add([m.detach() for m in master], self._previous, alpha=self.coefficient)

    def state_dict(self) -> dict[str, Any]:
        return {"form": "buffered", "previous": [tensor.clone() for tensor in self._previous]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_form(state, "buffered")
        self._previous = [tensor.clone() for tensor in state["previous"]]


def look_ahead(settings: Mapping[str, Any], *, delay: int, mismatch: int) -> Correction:
    return LookAheadErrorFeedback(settings["coefficient"])


def buffered(settings: Mapping[str, Any], *, delay: int, mismatch: int) -> Correction:
    return BufferedErrorFeedback(settings["coefficient"], settings["decay_at"])
