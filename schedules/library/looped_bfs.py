"""Breadth-first pipeline (LoopedBFS, arXiv 2211.05953): GPipe with several chunks of the model per rank.

Chunk c of rank r is stage c p + r. All micro-batches pass through a rank's first chunk, then through its
second, and so on; the backwards go through chunks and micro-batches in the opposite order, as in
`ScheduleLoopedBFS` of torch.distributed.pipelining.
"""

from __future__ import annotations

from schedules.actions import Op, Program
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed


def looped_bfs(segment: Segment, *, chunks: int = 1) -> Program:
    """Each rank holds `chunks` stages, and all m micro-batches are in flight at each of them."""
    order = []
    for rank in range(segment.ranks):
        forwards = [
            Slot(chunk * segment.ranks + rank, Op.FORWARD, index)
            for chunk in range(chunks)
            for index in range(segment.microbatches)
        ]
        order.append([*forwards, *(slot._replace(op=Op.BACKWARD) for slot in reversed(forwards))])
    return flushed(
        segment,
        schedule="looped-bfs",
        rank_of_stage=[*range(segment.ranks)] * chunks,
        order=order,
    )


LOOPED_BFS = Schedule(
    name="looped-bfs",
    description="gpipe with several chunks of the model per rank",
    program=looped_bfs,
    synchronous=True,
    bounded_activations=False,
    in_order=False,
    planned=False,
)
