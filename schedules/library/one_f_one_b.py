"""1F1B, flushed after each step (PipeDream-Flush, arXiv 2006.09503): GPipe with fewer activations."""

from __future__ import annotations

from schedules.actions import Program
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed, one_forward_one_backward


def one_f_one_b(segment: Segment) -> Program:
    """Each rank holds one stage; stage s has at most p - s micro-batches in flight."""
    return flushed(
        segment,
        schedule="1f1b",
        rank_of_stage=range(segment.ranks),
        order=[
            [
                Slot(stage, op, index)
                for op, index in one_forward_one_backward(
                    warmup=segment.ranks - 1 - stage, count=segment.microbatches
                )
            ]
            for stage in range(segment.ranks)
        ],
    )


ONE_F_ONE_B = Schedule(
    name="1f1b",
    description="one forward, one backward; flushed every step",
    program=one_f_one_b,
    synchronous=True,
)
