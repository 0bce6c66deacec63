"""The schedules by name, and what may be asked of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schedules.actions import Program
from schedules.errors import ScheduleError
from schedules.gpipe import gpipe
from schedules.interleaved import interleaved_1f1b
from schedules.one_f_one_b import one_f_one_b
from schedules.paci import paci
from schedules.pipedream import pipedream, pipedream_unstashed
from schedules.segment import Segment
from schedules.two_bw import two_bw
from schedules.zero_bubble import zero_bubble


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings beside the geometry, as asked for; which of them a schedule takes says its `Schedule`."""

    ahead: int
    delay: int | None
    delayed_from: int
    chunks: int
    update_interval: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One member of the family."""

    name: str
    description: str
    build: Callable[[Segment, Options], Program]
    synchronous: bool
    """Whether every gradient is applied to the weights that it was computed at."""
    takes_delay: bool = False
    takes_ahead: bool = False
    """Whether its stages may run further ahead than they must."""
    takes_chunks: bool = False
    """Whether a rank may hold several stages."""
    default_interval: Callable[[int], int] | None = None
    """Default update interval from the number of micro-batches a step; None: always that number."""


FAMILY: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            name="gpipe",
            description="all forwards, then all backwards; flushed every step",
            build=lambda segment, options: gpipe(segment),
            synchronous=True,
        ),
        Schedule(
            name="1f1b",
            description="one forward, one backward; flushed every step",
            build=lambda segment, options: one_f_one_b(segment),
            synchronous=True,
        ),
        Schedule(
            name="interleaved-1f1b",
            description="1f1b with several chunks of the model a rank",
            build=lambda segment, options: interleaved_1f1b(segment, chunks=options.chunks),
            synchronous=True,
            takes_chunks=True,
        ),
        Schedule(
            name="zero-bubble",
            description="ZB-H1: 1f1b with a split backward; weight halves fill the bubble",
            build=lambda segment, options: zero_bubble(segment),
            synchronous=True,
        ),
        Schedule(
            name="2bw",
            description="1f1b never flushed; weights d updates old at every stage",
            build=lambda segment, options: two_bw(
                segment, ahead=options.ahead, delay=options.delay, delayed_from=options.delayed_from
            ),
            synchronous=False,
            takes_delay=True,
            takes_ahead=True,
        ),
        Schedule(
            name="pipedream",
            description="1f1b never flushed; stages update on their own, weights stashed",
            build=lambda segment, options: pipedream(segment, update_interval=options.update_interval),
            synchronous=False,
            default_interval=lambda microbatches: 1,
        ),
        Schedule(
            name="pipedream-unstashed",
            description="pipedream without stash: the backward reads the newest weights",
            build=lambda segment, options: pipedream_unstashed(
                segment, update_interval=options.update_interval
            ),
            synchronous=False,
            default_interval=lambda microbatches: 1,
        ),
        Schedule(
            name="paci",
            description="1f1b never flushed; stages update on their own, one version, no stash",
            build=lambda segment, options: paci(segment, update_interval=options.update_interval),
            synchronous=False,
            default_interval=lambda microbatches: microbatches,
        ),
    )
}

NAMES: tuple[str, ...] = tuple(FAMILY)
"""The schedules that `build` knows."""


def find(name: str) -> Schedule:
    """The schedule called `name`.

    Raises:
        ScheduleError: There is none; the message lists those that there are.
    """
    if name not in FAMILY:
        raise ScheduleError(f"unknown schedule {name!r}; accepted: {', '.join(NAMES)}")
    return FAMILY[name]


def is_synchronous(name: str) -> bool:
    """Whether schedule `name` applies every gradient to the weights that it was computed at.

    Raises:
        ScheduleError: There is no schedule of that name.
    """
    return find(name).synchronous


def build(
    name: str,
    *,
    stages: int,
    microbatches: int,
    steps: int,
    first_step: int = 0,
    ahead: int = 1,
    delay: int | None = None,
    delayed_from: int = 0,
    chunks: int = 1,
    update_interval: int | None = None,
) -> Program:
    """The program of schedule `name` for one segment of a run.

    Args:
        name: One of `NAMES`.
        stages: Pipeline ranks p, and stages where a rank holds one; with `chunks` v there are p v stages.
        microbatches: Micro-batches a step.
        steps: Steps of the segment.
        first_step: Its first step, counted through the run.
        ahead: 2bw only: forwards that a stage runs ahead of its backwards, for each stage behind it.
        delay: 2bw only: updates between the weights of a gradient and those it is applied to; None: the
            smallest legal one.
        delayed_from: First step under delay, where those before it were synchronous; at most `first_step`.
        chunks: interleaved-1f1b only: stages a rank holds.
        update_interval: pipedream and paci only: backwards after which a stage updates, a divisor of
            `microbatches`; None: 1 for pipedream, `microbatches` for paci.

    Raises:
        ScheduleError: What is asked for cannot be; the message says why and what would be accepted.
    """
    schedule = find(name)
    for label, value, smallest in (
        ("stages", stages, 1),
        ("microbatches", microbatches, 1),
        ("steps", steps, 1),
        ("first_step", first_step, 0),
        ("delayed_from", delayed_from, 0),
        ("chunks", chunks, 1),
        ("delay", delay, 1),
        ("ahead", ahead, 1),
        ("update_interval", update_interval, 1),
    ):
        if value is not None and value < smallest:
            raise ScheduleError(f"{label} is {value}; accepted: {smallest} or more")
    if delay is not None and not schedule.takes_delay:
        raise ScheduleError(f"a delay can be chosen for 2bw only, and {delay} is asked of {name}")
    if ahead != 1 and not schedule.takes_ahead:
        raise ScheduleError(f"stages can run further ahead under 2bw only, and {ahead} is asked of {name}")
    if chunks != 1 and not schedule.takes_chunks:
        raise ScheduleError(f"{name} has one chunk of the model a rank, and {chunks} are asked for")
    if delayed_from > first_step:
        raise ScheduleError(f"the segment starts at step {first_step}, and delay only at step {delayed_from}")
    interval = _update_interval(schedule, microbatches=microbatches, asked=update_interval)
    segment = Segment(ranks=stages, microbatches=microbatches, steps=steps, first_step=first_step)
    return schedule.build(
        segment,
        Options(ahead=ahead, delay=delay, delayed_from=delayed_from, chunks=chunks, update_interval=interval),
    )


def _update_interval(schedule: Schedule, *, microbatches: int, asked: int | None) -> int:
    if schedule.default_interval is None:
        if asked not in (None, microbatches):
            raise ScheduleError(
                f"{schedule.name} updates once a step, after {microbatches} micro-batches; "
                f"an interval of {asked} is asked for"
            )
        return microbatches
    interval = schedule.default_interval(microbatches) if asked is None else asked
    if microbatches % interval:
        raise ScheduleError(
            f"an update interval of {interval} does not divide the {microbatches} micro-batches of a step"
        )
    return interval
