"""GPipe (arXiv 1811.06965): all forwards of a step, then all its backwards."""

from __future__ import annotations

from schedules.actions import Op, Program
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed


def gpipe(segment: Segment) -> Program:
    """Each rank holds one stage, and all m micro-batches are in flight between forwards and backwards."""
    return flushed(
        segment,
        schedule="gpipe",
        rank_of_stage=range(segment.ranks),
        order=[
            [
                Slot(stage, op, index)
                for op in (Op.FORWARD, Op.BACKWARD)
                for index in range(segment.microbatches)
            ]
            for stage in range(segment.ranks)
        ],
    )


GPIPE = Schedule(
    name="gpipe",
    description="all forwards, then all backwards; flushed every step",
    program=gpipe,
    synchronous=True,
    bounded_activations=False,
    planned=False,  # as long as 1f1b, and more memory
)
