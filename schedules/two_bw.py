"""PipeDream-2BW (arXiv 2006.09503): 1F1B that is never flushed; every step computes at weights d updates old.

W(t + 1) = W(t) - update(gradient at W(max(t - d, 0))): the same delay at every stage whatever the depth, for
d + 1 weight versions. Stage 0 runs p - 1 forwards ahead of its backwards, so the update of step t - d - 1 is
in time for step t's first forward if d m >= p - 1.
"""

from __future__ import annotations

from schedules.actions import Program
from schedules.errors import ScheduleError
from schedules.segment import Segment, unflushed


def smallest_delay(*, stages: int, microbatches: int) -> int:
    """The smallest delay d that 2bw can have: 1 where there are at least p - 1 micro-batches a step."""
    return max(1, -(-(stages - 1) // microbatches))


def two_bw(segment: Segment, *, delay: int | None, delayed_from: int) -> Program:
    """Each rank holds one stage and `delay + 1` versions of its weights.

    Args:
        segment: What is asked for.
        delay: Updates between the weights of a gradient and those it is applied to; None: the smallest legal
            one.
        delayed_from: First step under delay. The steps before it were synchronous and left one version.

    Raises:
        ScheduleError: `delay` is smaller than the order allows.
    """
    smallest = smallest_delay(stages=segment.ranks, microbatches=segment.microbatches)
    if delay is None:
        delay = smallest
    if delay < smallest:
        raise ScheduleError(
            f"2bw with {segment.ranks} stages and {segment.microbatches} micro-batches a step needs a delay "
            f"of at least {smallest}, and {delay} is asked for"
        )
    end_step = segment.first_step + segment.steps
    return unflushed(
        segment,
        schedule="2bw",
        update_interval=segment.microbatches,
        stashed=True,
        read=lambda microbatch, newest: max(microbatch // segment.microbatches - delay, delayed_from),
        initial_versions=tuple(range(max(segment.first_step - delay, delayed_from), segment.first_step + 1)),
        final_versions=tuple(range(max(end_step - delay, delayed_from), end_step + 1)),
    )
