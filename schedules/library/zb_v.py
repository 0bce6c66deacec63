"""ZB-V (zero bubble, arXiv 2401.10241, section 6): no bubble where F, I and W take equally long
and no rank waits for the norm of all others' gradients; here all do, for p - 1 forwards of a stage.

Each rank holds two stages, placed in a V (see `v_shape`). In the steady state a rank performs F, I and W of
its second stage, then of its first; at the end of a step weight halves fill what would be the bubble. A rank
holds the activations of p micro-batches over its share of the model, as stage 0 does in 1F1B. The order is
that of `ScheduleZBVZeroBubble` in torch.distributed.pipelining.
"""

from __future__ import annotations

from schedules.actions import Program
from schedules.library.v_shape import RankOrder, placement
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed


def zb_v(segment: Segment) -> Program:
    """Each rank holds two stages, and splits every backward."""
    return flushed(
        segment,
        schedule="zb-v",
        rank_of_stage=placement(segment.ranks),
        order=[
            _rank_order(rank, ranks=segment.ranks, microbatches=segment.microbatches)
            for rank in range(segment.ranks)
        ],
    )


def _rank_order(rank: int, *, ranks: int, microbatches: int) -> list[Slot]:
    down, up = rank, 2 * ranks - 1 - rank
    # With fewer micro-batches than fill the V, the order is that of 2 p - 1 without the missing ones.
    count = max(microbatches, 2 * ranks - 1)
    order = RankOrder(microbatches)

    def whole_backward(stage: int) -> None:
        order.input_half(stage)
        order.weight_half(stage)

    for _ in range(2 * (ranks - rank) - 1):
        order.forward(down)
    for _ in range(rank):
        order.forward(up)
        order.forward(down)
    for _ in range(ranks - rank):
        order.forward(up)
        whole_backward(up)
    # So far 2 p - 1 - r forwards of the first stage, p of the second.
    for _ in range(count - ranks):
        order.forward(down)
        whole_backward(down)
        order.forward(up)
        whole_backward(up)
    for _ in range(rank):
        order.input_half(down)
        order.input_half(up)
    for _ in range(ranks - rank):
        whole_backward(down)
    for stage in (up, down):
        for _ in range(count):
            order.weight_half(stage)
    return order.slots


ZB_V = Schedule(
    name="zb-v",
    description="ZB-V: two stages per rank in a V; weight halves fill the bubble",
    program=zb_v,
    synchronous=True,
    stages_per_rank=2,
    ends_together=True,
)
