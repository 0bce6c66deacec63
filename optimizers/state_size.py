"""How many values an optimizer keeps for its parameters, and takes for a step. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from optimizers.catalogue import check_options, method_named
from optimizers.grouping import Role
from optimizers.options import Value


def state_values(
    method: str, parameters: Iterable[tuple[Role, tuple[int, ...]]], options: Mapping[str, Value]
) -> int:
    """Values that the optimizer `method` keeps for parameters, step counters left out.

    Args:
        method: A name of `optimizers.NAMES`.
        parameters: Role and shape of each.
        options: Values of options that differ from the defaults.

    Raises:
        ValueError: Unknown optimizer or option.
    """
    declared, settings = method_named(method), check_options(method, options)
    alike = Counter(parameters)
    return sum(
        count * declared.rule(role.value).state_values(shape, settings)
        for (role, shape), count in alike.items()
    )


def step_values(
    method: str, parameters: Iterable[tuple[Role, tuple[int, ...]]], options: Mapping[str, Value]
) -> int:
    """Values that a step of the optimizer `method` takes for itself and gives back.

    Arguments and errors are those of `state_values`.
    """
    return _step_values(method, tuple(parameters), tuple(sorted(options.items())))


@lru_cache(maxsize=1024)  # a planner asks for the same parameters again and again
def _step_values(
    method: str, parameters: tuple[tuple[Role, tuple[int, ...]], ...], options: tuple[tuple[str, Value], ...]
) -> int:
    declared, settings = method_named(method), check_options(method, dict(options))
    groups: dict[Role, list[tuple[int, ...]]] = {}
    for role, shape in parameters:
        groups.setdefault(role, []).append(shape)
    return max(
        (declared.rule(role.value).step_values(shapes, settings) for role, shapes in groups.items()),
        default=0,
    )
