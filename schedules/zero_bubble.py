"""ZB-H1 (zero bubble, arXiv 2401.10241): 1F1B whose split backward fills two thirds of the bubble.

The input half I of a backward is what the stage before is waiting for; the weight half W can wait. Stage s
lets its first s weight halves lie until the end of the step, where 1F1B would idle; in return it, too, holds
the activations of p micro-batches, as many as stage 0 does in 1F1B.
"""

from __future__ import annotations

from schedules.actions import Op, Program
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
