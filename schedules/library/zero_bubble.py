"""ZB-H1 (zero bubble, arXiv 2401.10241): 1F1B whose split backward fills two thirds of the bubble.

The stage before waits for the input half I of a backward; the weight half W can be postponed. Stage s keeps
its weight halves s micro-batches behind, up to the end of the step, where 1F1B would idle. In return every
stage holds the activations of p micro-batches, as stage 0 does in 1F1B.
"""

from __future__ import annotations

from schedules.actions import Op, Program
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed, one_forward_one_backward


def zero_bubble(segment: Segment) -> Program:
    """Each rank holds one stage; no more than p micro-batches are in flight anywhere."""
    return flushed(
        segment,
        schedule="zero-bubble",
        rank_of_stage=range(segment.ranks),
        order=[_stage_order(stage, segment) for stage in range(segment.ranks)],
    )


def _stage_order(stage: int, segment: Segment) -> list[Slot]:
    slots = []
    for op, index in one_forward_one_backward(warmup=segment.ranks - 1 - stage, count=segment.microbatches):
        if op is Op.FORWARD:
            slots.append(Slot(stage, op, index))
            continue
        slots.append(Slot(stage, Op.BACKWARD_INPUT, index))
        if index >= stage:
            slots.append(Slot(stage, Op.BACKWARD_WEIGHT, index - stage))
    for index in range(max(segment.microbatches - stage, 0), segment.microbatches):
        slots.append(Slot(stage, Op.BACKWARD_WEIGHT, index))
    return slots


ZERO_BUBBLE = Schedule(
    name="zero-bubble",
    description="ZB-H1: 1f1b with a split backward; weight halves fill the bubble",
    program=zero_bubble,
    synchronous=True,
)
