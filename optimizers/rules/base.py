"""Base class and helpers of the optimizers here, which update lists of tensors at once."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optimizers.declaration import batch_size

Group = dict[str, Any]
"""A parameter group: `params`, `lr`, `weight_decay` and the rule's settings."""
State = dict[str, Any]
"""State of one parameter."""
Tensors = list[Tensor]
States = list[State]
"""The states of several parameters."""


class EagerOptimizer(torch.optim.Optimizer):
    """An optimizer that no compiled graph contains.

    torch's own import its compiler to stay out of such graphs: a second and 36 MB in every process.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class ListOptimizer(EagerOptimizer):
    """An optimizer whose rule updates all parameters of a group at once.

    Parameters without a gradient and their state do not change.
    """

    def __init__(self, groups: list[Group], settings: Mapping[str, Any]) -> None:
        """Settings apply to groups that do not set them."""
        super().__init__(groups, dict(settings))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; gradients are only read.

        Raises:
            ValueError: A closure was given; the rules here take one gradient per step.
        """
        if closure is not None:
            raise ValueError("this optimizer takes no closure")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                gradients = [parameter.grad for parameter in parameters]
                states = [self.state[parameter] for parameter in parameters]
                self.update(parameters, gradients, states, group)

    @abstractmethod
    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        """Update `parameters` (at least one) in place."""


def buffers(states: Sequence[State], name: str, like: Sequence[Tensor]) -> list[Tensor]:
    """The state tensors called `name`; missing ones are created as zeros like `like`."""
    for state, tensor in zip(states, like, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return [state[name] for state in states]


def count_step(states: Sequence[State]) -> int:
    """Increment the step count of every state and return it.

    Counts are CPU tensors, so that reading them does not synchronize with a device. They are equal within a
    group, because the trainer gives every parameter a gradient in every step.
    """
    for state in states:
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
    return int(states[0]["step"])


def decay(parameters: list[Tensor], group: Group) -> None:
    """Decoupled weight decay: W <- (1 - lr wd) W."""
    if group["weight_decay"] != 0:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])


def ema_momentum(
    momenta: list[Tensor], gradients: list[Tensor], beta: float, *, nesterov: bool
) -> list[Tensor]:
    """Update M <- beta M + (1 - beta) G in place and return the direction to step in.

    The direction is M, or with `nesterov` the look-ahead (1 - beta) G + beta M.
    """
    torch._foreach_lerp_(momenta, gradients, 1 - beta)
    if not nesterov:
        return momenta
    return list(torch._foreach_lerp(gradients, momenta, beta))


_BATCHED_ON_CPU = 192
"""Largest smaller side of matrices that a CPU takes as a batch; larger ones are as fast one by one, without
a copy."""


def by_shape(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions in `tensors`, batched by equal shape, in the order in which shapes first appear.

    A batch has at most `batch_size` tensors. Large matrices on a CPU are not batched.
    """
    positions: dict[torch.Size, list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault(tensor.shape, []).append(position)
    batches = []
    for shape, members in positions.items():
        small = tensors[members[0]].device.type != "cpu" or min(shape) <= _BATCHED_ON_CPU
        count = batch_size(shape) if small else 1
        batches += [members[first : first + count] for first in range(0, len(members), count)]
    return batches


def as_batch(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one batch, for reading only: a single tensor gives a view."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
