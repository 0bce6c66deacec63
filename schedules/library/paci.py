"""PACI (arXiv 2606.07881): asynchronous 1F1B with one weight version and no stash.

Stage s admits a forward while fewer than p - s of its micro-batches are in flight, which is the order of
1F1B. Forward and backward both read the newest weights. A stage updates on its own after every a backwards,
so at most ceil((p - 1 - s) / a) updates fall between a micro-batch's forward and its backward.
"""

from __future__ import annotations

from schedules.actions import Program
from schedules.schedule import Schedule
from schedules.segment import Segment, unflushed


def paci(segment: Segment, *, update_interval: int) -> Program:
    """`update_interval` is the paper's accumulation a."""
    return unflushed(
        segment,
        schedule="paci",
        update_interval=update_interval,
        updates_together=False,
        stashed=False,
        ahead=1,
        read=lambda microbatch, newest: newest,
        initial_versions=(segment.first_microbatch // update_interval,),
        final_versions=(segment.end_microbatch // update_interval,),
    )


PACI = Schedule(
    name="paci",
    description="1f1b never flushed; stages update on their own, one version, no stash",
    program=paci,
    synchronous=False,
    default_interval=lambda microbatches: microbatches,
)
