"""A custom optimizer: `package.module:name` names a function, or a class such as torch's.

    def my_optimizer(groups, *, lr, weight_decay, **options) -> torch.optim.Optimizer: ...

`groups` are parameter groups as torch's optimizers take them, one for each role. Each has `params`, pairs of
a name and a parameter, its `lr` and `weight_decay` (0 where weight decay does not apply), and `role`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from optimizers.named import import_named
from optimizers.options import Value

SAVED_SCALARS = (bool, int, float, str, type(None))
"""Types of state that a checkpoint holds, in addition to tensors."""
SAVED_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
"""Types of tensors that a checkpoint holds."""

_LR, _WEIGHT_DECAY = 1e-3, 0.1
"""Settings of the optimizers that are built to be checked or measured."""

_SHAPES = {
    "embedding.weight": (16, 8),
    "blocks.0.attention.query.weight": (8, 8),
    "blocks.0.mlp.up.weight": (12, 8),
    "blocks.0.norm.weight": (8,),
    "head.weight": (16, 8),
}
_ROLES = {"embedding.weight": "embedding", "blocks.0.norm.weight": "vector", "head.weight": "head"}
_SMALL_SIDE = 64


class OptimizerError(ValueError):
    """What `optimizer.name` names cannot be used."""


def unsaved(value: object) -> str | None:
    """What a value of an optimizer's state is, where a checkpoint cannot hold it; None where it can."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return f"a tensor of layout {value.layout}"
        return None if value.dtype in SAVED_DTYPES else f"a tensor of {value.dtype}"
    # Not a class derived from one of these: `numpy.float64` is a float, and would come back as another type.
    kind = type(value)
    if kind in SAVED_SCALARS:
        return None
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__name__}"


def build_custom(
    name: str, groups: list[dict[str, Any]], *, lr: float, weight_decay: float, options: Mapping[str, Value]
) -> torch.optim.Optimizer:
    """The optimizer that `name` makes for `groups`; each of its groups gets a `peak_lr`.

    Raises:
        OptimizerError: It cannot be imported or called, or what it returns is not an optimizer of
            exactly these parameters.
    """
    given = [parameter for group in groups for _, parameter in group["params"]]
    try:
        factory = import_named(name)
    except (Exception, SystemExit) as error:
        raise OptimizerError(
            f"{name} cannot be imported ({_described(error)}); install it, or name its folder in PYTHONPATH"
        ) from error
    if not callable(factory):
        raise OptimizerError(f"{name} is {type(factory).__name__}, must be a function or a class")
    try:
        optimizer = factory(groups, lr=lr, weight_decay=weight_decay, **options)
    except (Exception, SystemExit) as error:
        raise OptimizerError(f"{name} fails ({_described(error)})") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"{name} returns {type(optimizer).__name__}, must return a torch.optim.Optimizer"
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if sorted(map(id, held)) != sorted(map(id, given)):
        raise OptimizerError(
            f"{name} returns an optimizer of {len(held)} parameters, must be of the {len(given)} given"
        )
    for group in optimizer.param_groups:
        group["peak_lr"] = float(group["lr"])
    return optimizer


@lru_cache(maxsize=1000)
def check_custom(name: str, options: tuple[tuple[str, Value], ...]) -> None:
    """Take three steps with tiny parameters on the CPU, the third also from what a checkpoint holds.

    Raises:
        OptimizerError: The optimizer cannot be built or fails, its state cannot be saved, or the third step
            differs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = [torch.randn(shape) for shape in _SHAPES.values()]
        gradients = [[torch.randn(shape) for shape in _SHAPES.values()] for _ in range(3)]
        parameters, optimizer = _tiny(name, weights, dict(options))
        for number in range(2):
            _step(name, optimizer, parameters, gradients[number], number)
        kept = [_saved(name, optimizer, parameter) for parameter in parameters]
        if len(optimizer.state) > len(parameters):
            raise OptimizerError(f"{name} keeps state that is of no parameter, which is not saved")
        resumed, other = _tiny(name, [parameter.detach() for parameter in parameters], dict(options))
        for parameter, state in zip(resumed, kept, strict=True):
            if state:
                other.state[parameter] = state
        _step(name, optimizer, parameters, gradients[2], 2)
        _step(name, other, resumed, gradients[2], 2)
    if not all(torch.equal(a, b) for a, b in zip(parameters, resumed, strict=True)):
        raise OptimizerError(
            f"{name} steps differently after a checkpoint: whatever it keeps must be in its `state`, by "
            "parameter, and it must draw no random numbers"
        )


def measured_values(name: str, role: str, shape: tuple[int, ...], options: Mapping[str, Value]) -> int:
    """Float32 values that the optimizer keeps for a parameter of this role and shape after one step.

    The step is taken on torch's meta device, which computes shapes and no values. Where that fails, it is
    taken on the CPU with sides of at most 64, and the state is taken to grow with the parameter. Single
    numbers are not counted.

    Raises:
        OptimizerError: The step fails.
    """
    return -(-_state_bytes(name, role, shape, tuple(sorted(options.items()))) // 4)


@lru_cache(maxsize=10_000)
def _state_bytes(name: str, role: str, shape: tuple[int, ...], options: tuple[tuple[str, Value], ...]) -> int:
    small = tuple(min(side, _SMALL_SIDE) for side in shape)
    for device, tried in (("meta", shape), ("cpu", small)):
        parameter = torch.nn.Parameter(torch.zeros(tried, device=device))
        label = next(
            (label for label, its_role in _ROLES.items() if its_role == role), "blocks.0.mlp.up.weight"
        )
        optimizer = build_custom(
            name, _groups({label: parameter}), lr=_LR, weight_decay=_WEIGHT_DECAY, options=dict(options)
        )
        parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        except (Exception, SystemExit) as error:
            if device == "meta":
                continue
            raise OptimizerError(f"{name} fails in a step ({_described(error)})") from error
        state = optimizer.state.get(parameter, {}).values()
        kept = sum(value.nbytes for value in state if isinstance(value, Tensor) and value.ndim > 0)
        return kept * prod(shape) // prod(tried)
    raise AssertionError("unreachable")


def _tiny(
    name: str, weights: Sequence[Tensor], options: Mapping[str, Value]
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    groups = _groups(dict(zip(_SHAPES, parameters, strict=True)))
    optimizer = build_custom(name, groups, lr=_LR, weight_decay=_WEIGHT_DECAY, options=options)
    return parameters, optimizer


def _groups(parameters: Mapping[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for label, parameter in parameters.items():
        role = _ROLES.get(label, "matrix")
        decayed = role in ("matrix", "head")
        group = {"params": [], "lr": _LR, "weight_decay": _WEIGHT_DECAY * decayed, "role": role}
        groups.setdefault(role, group)["params"].append((label, parameter))
    return list(groups.values())


def _step(
    name: str,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    number: int,
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * (1 - 0.1 * number)
    try:
        optimizer.step()
    except (Exception, SystemExit) as error:
        raise OptimizerError(f"{name} fails in a step ({_described(error)})") from error


def _saved(name: str, optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """A parameter's state as a checkpoint gives it back."""
    state: Mapping[Any, Any] = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise OptimizerError(f"{name} keeps state called {key!r}, must be text without a slash")
        if (what := unsaved(value)) is not None:
            raise OptimizerError(
                f"{name} keeps {key}, {what}, which cannot be saved; accepted: tensors, numbers, text"
            )
        for other, which in ((parameter, "parameter"), (parameter.grad, "gradient")):
            if isinstance(value, Tensor) and other is not None and _same_memory(value, other):
                raise OptimizerError(
                    f"{name} keeps {key}, the {which} itself, which the next step overwrites; accepted: a "
                    f"copy ({which}.clone())"
                )
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _same_memory(first: Tensor, second: Tensor) -> bool:
    one, other = (tensor.untyped_storage().data_ptr() for tensor in (first, second))
    return one == other != 0


def _described(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
