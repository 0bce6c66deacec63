"""How many values an optimizer keeps for each parameter. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from optimizers.catalogue import METHODS, check_options
from optimizers.grouping import role_of

_Shape = tuple[int, ...]
_Settings = Mapping[str, object]


def _copies(count: int) -> Callable[[_Shape, _Settings], int]:
    return lambda shape, settings: count * prod(shape)


def _momentum(shape: _Shape, settings: _Settings) -> int:
    return prod(shape) if settings["momentum"] else 0


def _normuon(shape: _Shape, settings: _Settings) -> int:
    return prod(shape) + shape[0]


def _soap(shape: _Shape, settings: _Settings) -> int:
    rows, columns = shape
    return 2 * rows * columns + 2 * rows**2 + 2 * columns**2


def _basis_rotation(shape: _Shape, settings: _Settings) -> int:
    rows, columns = shape
    sides = shape if settings["geometry"] == "bilateral" else (min(rows, columns),)
    kept = 2 if settings["source"] == "second-moment" else 1
    return 2 * rows * columns + kept * sum(side**2 for side in sides)


_VALUES: Mapping[str, Callable[[_Shape, _Settings], int]] = {
    "adamw": _copies(2),
    "adan": _copies(4),
    "basis-rotation": _basis_rotation,
    "lion": _copies(1),
    "mars": _copies(3),
    "muon": _copies(1),
    "nadamw": _copies(2),
    "normuon": _normuon,
    "scion-sign": _copies(1),
    "scion-spectral": _copies(1),
    "sgd": _momentum,
    "soap": _soap,
}
"""By rule of the catalogue; step counters, one number a parameter, are not counted."""


def state_values(method: str, shapes: Mapping[str, _Shape], options: Mapping[str, object]) -> int:
    """Values that the optimizer `method` keeps for parameters, step counters left out.

    Args:
        method: A name of `optimizers.NAMES`.
        shapes: Of the parameters, by name.
        options: What differs from the method's defaults.

    Raises:
        ValueError: Unknown optimizer or option, or a parameter without a rule.
    """
    rules, settings = METHODS[method].rules, check_options(method, options)
    return sum(
        _VALUES[rules[role_of(name, len(shape)).value]](shape, settings) for name, shape in shapes.items()
    )
