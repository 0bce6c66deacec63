"""The schedules by name, and the one way to build a program."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from schedules.actions import Program, ScheduleError
from schedules.custom import custom_function, custom_program, is_custom
from schedules.head_shards import FURTHER_AHEAD, with_head_shards
from schedules.library.controllable_memory import V_HALF, V_MIN
from schedules.library.dualpipe_v import DUALPIPE_V
from schedules.library.fully_sharded import FSDP, HSDP
from schedules.library.gpipe import GPIPE
from schedules.library.interleaved import INTERLEAVED_1F1B
from schedules.library.looped_bfs import LOOPED_BFS
from schedules.library.one_f_one_b import ONE_F_ONE_B
from schedules.library.paci import PACI
from schedules.library.paci_v import PACI_V
from schedules.library.pipedream import PIPEDREAM, PIPEDREAM_UNSTASHED
from schedules.library.two_bw import TWO_BW
from schedules.library.two_bw_v import TWO_BW_V
from schedules.library.zb_v import ZB_V
from schedules.library.zero_bubble import ZERO_BUBBLE
from schedules.options import OPTIONS, checked
from schedules.schedule import Schedule, options_of, parameters_of
from schedules.segment import Segment, delay_for_lead

FAMILY: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED_1F1B,
        LOOPED_BFS,
        ZERO_BUBBLE,
        ZB_V,
        V_HALF,
        V_MIN,
        DUALPIPE_V,
        TWO_BW,
        TWO_BW_V,
        PIPEDREAM,
        PIPEDREAM_UNSTASHED,
        PACI,
        PACI_V,
    )
}

NAMES: tuple[str, ...] = tuple(FAMILY)
"""The schedules of the family."""

KNOWN: dict[str, Schedule] = FAMILY | {schedule.name: schedule for schedule in (FSDP, HSDP)}
"""What a run's schedule may be called: a pipeline of the family, or a way to shard that pipelines are
compared with."""


def find(name: str) -> Schedule:
    """The schedule called `name`.

    Raises:
        ScheduleError: There is none; the message lists the accepted names.
    """
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ScheduleError(
            f"unknown schedule {name!r}; {hint}accepted: {', '.join(KNOWN)}, or package.module:function"
        )
    return KNOWN[name]


def is_synchronous(name: str) -> bool:
    """Whether schedule `name` applies every gradient to the weights that it was computed at.

    Raises:
        ScheduleError: There is no schedule of that name.
    """
    return find(name).synchronous


def options_taken(name: str) -> frozenset[str]:
    """The options that schedule `name`, of the family or custom, takes.

    Raises:
        ScheduleError: There is no such schedule.
    """
    return options_of(custom_function(name)) if is_custom(name) else find(name).options


def smallest_delay(
    name: str, *, stages: int, microbatches: int, shard_head: bool = False, **options: Any
) -> int:
    """The smallest delay that schedule `name` can have; 1 for those that take none.

    Args:
        name: One of `NAMES`.
        stages: Pipeline ranks p.
        microbatches: Micro-batches per step.
        shard_head: As in `build`.
        options: As in `build`.

    Raises:
        ScheduleError: There is no schedule of that name, or an option is not accepted.
    """
    least = least_lead(name, stages=stages, shard_head=shard_head, **options)
    return 1 if least is None else delay_for_lead(lead=least, microbatches=microbatches)


def least_lead(name: str, *, stages: int, shard_head: bool = False, **options: Any) -> int | None:
    """The least d m with which schedule `name` can have a delay of d with m micro-batches per step; None: it
    takes no delay. Arguments and errors are those of `smallest_delay`."""
    schedule, settings = find(name), checked(options)
    if schedule.lead is None:
        return None
    given = {option: value for option, value in settings.items() if option in schedule.lead_options}
    return schedule.lead(ranks=stages, **given) + FURTHER_AHEAD * shard_head


def build(
    name: str,
    *,
    stages: int,
    microbatches: int,
    steps: int,
    first_step: int = 0,
    delayed_from: int = 0,
    shard_head: bool = False,
    tied: bool = False,
    **options: Any,
) -> Program:
    """The program of schedule `name` for one segment of a run.

    Args:
        name: One of `NAMES`, or `package.module:function` (see `schedules.custom`).
        stages: Pipeline ranks p, and stages where a rank holds one; with `chunks` v there are p v stages.
        microbatches: Micro-batches per step.
        steps: Steps of the segment.
        first_step: Its first step, counted through the run.
        delayed_from: First step under delay, where those before it were synchronous; at most `first_step`.
        shard_head: Whether the head is in shards on all ranks (see `schedules.head_shards`).
        tied: With `shard_head`, whether these are shards of the embedding, too.
        options: Some of `schedules.OPTIONS`, which says what they mean. The schedule has to take them, unless
            they are as it has them anyway.

    Raises:
        ScheduleError: The schedule cannot be built with these numbers; the message says what would be
            accepted.
        TypeError: There is no such option.
    """
    taken = options_taken(name)
    for label, value, smallest in (
        ("stages", stages, 1),
        ("microbatches", microbatches, 1),
        ("steps", steps, 1),
        ("first_step", first_step, 0),
        ("delayed_from", delayed_from, 0),
    ):
        if value < smallest:
            raise ScheduleError(f"{label} is {value}; accepted: {smallest} or more")
    settings = _settled(name, taken, options, microbatches=microbatches)
    if delayed_from > first_step:
        raise ScheduleError(f"the segment starts at step {first_step}, and delay only at step {delayed_from}")
    if shard_head and name in KNOWN and "delay" in taken:
        smallest = smallest_delay(name, stages=stages, microbatches=microbatches, shard_head=True, **settings)
        delay = smallest if settings["delay"] is None else settings["delay"]
        if delay < smallest:
            raise ScheduleError(
                f"{name} with shards of the head on {stages} ranks, with {microbatches} micro-batches per "
                f"step, needs a delay of at least {smallest}, and {delay} is asked for"
            )
        settings["delay"] = delay
    settings["update_interval"] = _update_interval(
        name, microbatches=microbatches, asked=settings["update_interval"]
    )
    given = {option: value for option, value in settings.items() if option in taken and value is not None}
    segment = Segment(ranks=stages, microbatches=microbatches, steps=steps, first_step=first_step)
    function = custom_function(name) if is_custom(name) else KNOWN[name].program
    if "delayed_from" in parameters_of(function):
        given["delayed_from"] = delayed_from
    program = custom_program(name, segment, given) if is_custom(name) else function(segment, **given)
    return with_head_shards(program, tied=tied) if shard_head else program


def _settled(
    name: str, taken: frozenset[str], options: Mapping[str, Any], *, microbatches: int
) -> dict[str, Any]:
    """The value of every option, checked."""
    settings = checked({option: declared.default for option, declared in OPTIONS.items()} | dict(options))
    has_anyway = {
        "chunks": KNOWN[name].stages_per_rank if name in KNOWN else 1,
        "update_interval": microbatches,
    }
    for option, value in settings.items():
        default = OPTIONS[option].default
        if option not in taken and value not in (default, has_anyway.get(option, default)):
            takers = [other for other, schedule in KNOWN.items() if option in schedule.options]
            raise ScheduleError(
                f"{name} does not take {option}, and {value} is asked for; taken by {', '.join(takers)}"
            )
    return settings


def _update_interval(name: str, *, microbatches: int, asked: int | None) -> int | None:
    """The update interval to pass on; None leaves it to a custom function."""
    if asked is None and name in KNOWN:
        default = KNOWN[name].default_interval
        asked = None if default is None else default(microbatches)
    if asked is not None and microbatches % asked:
        raise ScheduleError(
            f"an update interval of {asked} does not divide the {microbatches} micro-batches of a step"
        )
    return asked
