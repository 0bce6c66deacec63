"""PipeDream (SOSP 2019): 1F1B never flushed; a stage updates after every `update_interval` backwards.

A forward reads the newest weights. With stashing, its backward reads the same ones: p - s versions and a
delay of p - 1 - s at stage s with an interval of 1. Without stashing the backward reads the newest as well,
as in PipeMare (arXiv 1910.05124) and in basis rotation's memory-saving setting (arXiv 2602.03515): one
version, but the two halves of a gradient belong to different weights.
"""

from __future__ import annotations

from schedules.actions import Program
from schedules.schedule import Schedule
from schedules.segment import Segment, unflushed


def pipedream(segment: Segment, *, update_interval: int = 1) -> Program:
    """With weight stashing."""
    return _local_updates(segment, schedule="pipedream", update_interval=update_interval, stashed=True)


def pipedream_unstashed(segment: Segment, *, update_interval: int = 1) -> Program:
    """Without weight stashing."""
    return _local_updates(
        segment, schedule="pipedream-unstashed", update_interval=update_interval, stashed=False
    )


def _local_updates(segment: Segment, *, schedule: str, update_interval: int, stashed: bool) -> Program:
    return unflushed(
        segment,
        schedule=schedule,
        update_interval=update_interval,
        updates_together=False,
        stashed=stashed,
        ahead=1,
        read=lambda microbatch, newest: newest,
        initial_versions=(segment.first_microbatch // update_interval,),
        final_versions=(segment.end_microbatch // update_interval,),
    )


def _after_every_backward(_microbatches: int) -> int:
    return 1


PIPEDREAM = Schedule(
    name="pipedream",
    description="1f1b never flushed; stages update on their own, weights stashed",
    program=pipedream,
    synchronous=False,
    default_interval=_after_every_backward,
)

PIPEDREAM_UNSTASHED = Schedule(
    name="pipedream-unstashed",
    description="pipedream without stash: the backward reads the newest weights",
    program=pipedream_unstashed,
    synchronous=False,
    default_interval=_after_every_backward,
    planned=False,  # paci with an update after every backward
)
