"""The options of schedules, each declared once. The arguments of `schedules.build`, the keys of a run's
`schedule` section and their rows in docs/configuration.md follow.

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

    kind: Any
    """Type of the key in a run's configuration."""
    default: Any
    """Value of a program that is built without it; None is left to the function's own default."""
    run_default: Any
    """Default of the key in a run's configuration; null stands for `default`."""
    meaning: str
    """Begins with the schedules that take it."""
    low: int | None = None
    high: int | None = None
    check: Callable[[Any], Any] | None = None
    """Returns a value in its usual form; raises ScheduleError where it is not accepted."""
    shared: bool = False
    """Whether every arm of a matrix may have it: a run ignores it where its schedule does not take it, and
    refuses other options."""


OPTIONS: Mapping[str, ScheduleOption] = {
    "delay": ScheduleOption(
        kind=int,
        default=None,
        run_default=1,
        low=1,
        high=1_000,
        shared=True,
        meaning="2bw, 2bw-v: updates between the weights a gradient is computed at and those it is applied "
        "to. In 2bw a delay of 1 needs at least `parallel.stages` - 1 micro-batches.",
    ),
    "ahead": ScheduleOption(
        kind=int,
        default=1,
        run_default=1,
        low=1,
        high=1_000,
        shared=True,
        meaning="2bw: forwards a stage runs ahead of its backwards, for each stage after it. 2 hides late "
        "messages and uneven times, and keeps up to twice the activations; a delay of 1 then needs twice as "
        "many micro-batches. 2bw-v, paci-v: each message has `ahead` - 1 sixths of a micro-batch's time to "
        "arrive.",
    ),
    "chunks": ScheduleOption(
        kind=int,
        default=1,
        run_default=1,
        low=1,
        high=1_000,
        meaning="interleaved-1f1b, looped-bfs: stages per rank.",
    ),
    "split": ScheduleOption(
        kind=bool,
        default=False,
        run_default=False,
        meaning="2bw-v: split backwards, for fewer activations.",
    ),
    "costs": ScheduleOption(
        kind=list[int] | None,
        default=EVEN_COSTS,
        run_default=None,
        check=block_costs,
        shared=True,
        meaning="2bw-v, paci-v: times of a stage's forward and of the two halves of its backward, whole "
        "numbers up to 24 in any unit; the order leaves no rank idle at these. null: [1, 1, 1].",
    ),
    "update_interval": ScheduleOption(
        kind=int | None,
        default=None,
        run_default=None,
        low=1,
        high=100_000,
        meaning="pipedream, paci, paci-v: micro-batches between a stage's updates; null: 1 for pipedream, "
        "`microbatches` for the others.",
    ),
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
