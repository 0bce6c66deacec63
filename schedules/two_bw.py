"""PipeDream-2BW (arXiv 2006.09503): 1F1B that is never flushed; every step computes at weights d updates old.

W(t + 1) = W(t) - update(gradient at W(max(t - d, 0))): the same delay at every stage whatever the depth, for
d + 1 weight versions. Stage s runs a (p - 1 - s) forwards ahead of its backwards, so the update of step
t - d - 1 is in time for step t's first forward if d m >= a (p - 1).

The paper's a is 1: p - s micro-batches are in flight at stage s, as many as keep it busy where nothing is
late. With 2 a stage has a micro-batch at hand while another is under way, which hides messages that take up
to half of a micro-batch's time each. It changes what is in flight, and no version: the weights are the same.
"""

from __future__ import annotations

from schedules.actions import Program
from schedules.errors import ScheduleError
from schedules.segment import Segment, unflushed


def smallest_delay(*, stages: int, microbatches: int, ahead: int = 1) -> int:
    """The smallest delay d that 2bw can have: 1 where there are at least a (p - 1) micro-batches a step."""
    return max(1, -(-ahead * (stages - 1) // microbatches))


def two_bw(segment: Segment, *, ahead: int, delay: int | None, delayed_from: int) -> Program:
    """Each rank holds one stage and `delay + 1` versions of its weights.

    Args:
        segment: What is asked for.
        ahead: Forwards that a stage runs ahead of its backwards, for each stage behind it.
        delay: Updates between the weights of a gradient and those it is applied to; None: the smallest legal
            one.
        delayed_from: First step under delay. The steps before it were synchronous and left one version.

    Raises:
        ScheduleError: `delay` is smaller than the order allows.
    """
    smallest = smallest_delay(stages=segment.ranks, microbatches=segment.microbatches, ahead=ahead)
    if delay is None:
        delay = smallest
    if delay < smallest:
        further = "" if ahead == 1 else f", {ahead} ahead for each stage,"
        raise ScheduleError(
            f"2bw with {segment.ranks} stages and {segment.microbatches} micro-batches a step{further} needs "
            f"a delay of at least {smallest}, and {delay} is asked for"
        )
    end_step = segment.first_step + segment.steps
    return unflushed(
        segment,
        schedule="2bw",
        update_interval=segment.microbatches,
        stashed=True,
        ahead=ahead,
        read=lambda microbatch, newest: max(microbatch // segment.microbatches - delay, delayed_from),
        initial_versions=tuple(range(max(segment.first_step - delay, delayed_from), segment.first_step + 1)),
        final_versions=tuple(range(max(end_step - delay, delayed_from), end_step + 1)),
    )
