"""The options of schedules: the arguments of `schedules.build`, and keys of a run's `schedule` section, where
their meaning stands.

A schedule takes an option by a parameter of that name of its function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schedules.actions import ScheduleError
from schedules.library.v_block import EVEN_COSTS, block_costs


@dataclass(frozen=True, kw_only=True)
class ScheduleOption:
    """An option that schedules may take."""

    default: Any = None
    """Value of a program that is built without it; None is left to the function's own default."""
    low: int | None = None
    check: Callable[[Any], Any] | None = None
    """Returns a value in its usual form; raises ScheduleError where it is not accepted."""
    shared: bool = False
    """Whether every arm of a matrix may have it: a run ignores it where its schedule does not take it, and
    refuses other options."""


OPTIONS: Mapping[str, ScheduleOption] = {
    "delay": ScheduleOption(low=1, shared=True),
    "ahead": ScheduleOption(default=1, low=1, shared=True),
    "chunks": ScheduleOption(default=1, low=1),
    "split": ScheduleOption(default=False),
    "costs": ScheduleOption(default=EVEN_COSTS, check=block_costs, shared=True),
    "update_interval": ScheduleOption(low=1),
}


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in their usual form.

    Raises:
        ScheduleError: A value is not accepted.
        TypeError: There is no such option.
    """
    if unknown := options.keys() - OPTIONS.keys():
        raise TypeError(
            f"no option of schedules: {', '.join(sorted(unknown))}; accepted: {', '.join(OPTIONS)}"
        )
    settings = {}
    for name, value in options.items():
        option = OPTIONS[name]
        if option.low is not None and value is not None and value < option.low:
            raise ScheduleError(f"{name} is {value}; accepted: {option.low} or more")
        settings[name] = value if option.check is None else option.check(value)
    return settings
