"""DualPipeV (DeepSeek, github.com/deepseek-ai/DualPipe): DualPipe cut in half, two stages per rank in a V.

In the steady state a forward of one stage is paired with a whole backward of the other, so that the messages
of one can hide behind the computation of the other; this package performs a pair one after the other. The
backwards of the filling and of the draining are split. The order is that of `ScheduleDualPipeV` in
torch.distributed.pipelining.
"""

from __future__ import annotations

from schedules.actions import Program, ScheduleError
from schedules.library.v_shape import RankOrder, placement
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed


def dualpipe_v(segment: Segment) -> Program:
    """Each rank holds two stages.

    Raises:
        ScheduleError: There are fewer micro-batches than stages.
    """
    if segment.microbatches < 2 * segment.ranks:
        raise ScheduleError(
            f"dualpipe-v with {2 * segment.ranks} stages needs at least as many micro-batches per step, "
            f"and {segment.microbatches} are asked for"
        )
    return flushed(
        segment,
        schedule="dualpipe-v",
        rank_of_stage=placement(segment.ranks),
        order=[
            _rank_order(rank, ranks=segment.ranks, microbatches=segment.microbatches)
            for rank in range(segment.ranks)
        ],
    )


def _rank_order(rank: int, *, ranks: int, microbatches: int) -> list[Slot]:
    down, up = rank, 2 * ranks - 1 - rank
    behind = ranks - 1 - rank
    order = RankOrder(microbatches)
    for _ in range(2 * behind):
        order.forward(down)
    for _ in range(rank + 1):
        order.forward(down)
        order.forward(up)
    for _ in range(behind):
        order.input_half(up)
        order.weight_half()
        order.forward(up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        order.forward(down)
        order.backward(up)
        order.forward(up)
        order.backward(down)
    for _ in range(behind):
        order.backward(up)
        order.forward(up)
        order.backward(down)
    # Of the last 2 (r + 1) backwards before the end the second half is split.
    for number in range(2 * (rank + 1)):
        stage = down if number % 2 else up
        if number > rank:
            order.input_half(stage)
        else:
            order.backward(stage)
    for _ in range(behind):
        order.weight_half()
        order.input_half(down)
    for _ in range(rank + 1):
        order.weight_half()
    return order.slots


DUALPIPE_V = Schedule(
    name="dualpipe-v",
    description="two stages per rank in a V; forwards of one next to backwards of the other",
    program=dualpipe_v,
    synchronous=True,
    stages_per_rank=2,
    ends_together=True,
    planned=False,
)
