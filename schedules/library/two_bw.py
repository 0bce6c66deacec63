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
from schedules.schedule import Schedule
from schedules.segment import Segment, legal_delay, unflushed


def lead(*, ranks: int, ahead: int = 1) -> int:
    """Forwards that the first stage runs ahead of its backwards: a delay of d needs d m >= a (p - 1)."""
    return ahead * (ranks - 1)


def two_bw(segment: Segment, *, ahead: int = 1, delay: int | None = None, delayed_from: int = 0) -> Program:
    """Each rank holds one stage and `delay + 1` versions of its weights.

    Args:
        segment: To build the program for.
        ahead: Forwards that a stage runs ahead of its backwards, for each stage after it.
        delay: Updates between the weights of a gradient and those it is applied to; None: the smallest legal
            one.
        delayed_from: First step under delay; the steps before it were synchronous and left one version.

    Raises:
        ScheduleError: `delay` is smaller than the order allows.
    """
    delay = legal_delay(segment, schedule="2bw", delay=delay, lead=lead(ranks=segment.ranks, ahead=ahead))
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


TWO_BW = Schedule(
    name="2bw",
    description="1f1b never flushed; weights d updates old at every stage",
    program=two_bw,
    synchronous=False,
    lead=lead,
)
