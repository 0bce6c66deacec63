"""Interleaved 1F1B (arXiv 2104.04473): v chunks of the model per rank, and a v-th of 1F1B's filling.

Chunk c of rank r is stage c p + r. The micro-batches go in rounds: a round passes through the rank's first
chunk, then its second, and so on; the backwards go through the chunks in the opposite order. A round has p
micro-batches where p divides m; else m is cut into m // p equal rounds, the relaxation that
torch.distributed.pipelining makes too.
"""

from __future__ import annotations

from dataclasses import replace

from schedules.actions import Op, Program, ScheduleError
from schedules.library.one_f_one_b import one_f_one_b
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed, one_forward_one_backward


def interleaved_1f1b(segment: Segment, *, chunks: int = 1) -> Program:
    """Each rank holds `chunks` stages; with one there is nothing to interleave, and this is `1f1b`.

    Raises:
        ScheduleError: The micro-batches do not divide into equal rounds.
    """
    if chunks == 1:
        return replace(one_f_one_b(segment), schedule="interleaved-1f1b")
    ranks, microbatches = segment.ranks, segment.microbatches
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ScheduleError(
            f"interleaved-1f1b has rounds of equally many micro-batches, and {microbatches} micro-batches "
            f"on {ranks} ranks do not divide into {rounds} of them; accepted: a multiple of {ranks}"
        )
    return flushed(
        segment,
        schedule="interleaved-1f1b",
        rank_of_stage=[stage % ranks for stage in range(ranks * chunks)],
        order=[
            _rank_order(
                rank, ranks=ranks, chunks=chunks, microbatches=microbatches, per_round=microbatches // rounds
            )
            for rank in range(ranks)
        ],
    )


def _rank_order(rank: int, *, ranks: int, chunks: int, microbatches: int, per_round: int) -> list[Slot]:
    # A rank further from the last one must run ahead by its distance twice: there and back.
    warmup = (chunks - 1) * per_round + 2 * (ranks - 1 - rank)
    slots = []
    for op, turn in one_forward_one_backward(warmup=warmup, count=chunks * microbatches):
        lap, within = divmod(turn, per_round)
        chunk = lap % chunks if op is Op.FORWARD else chunks - 1 - lap % chunks
        slots.append(Slot(chunk * ranks + rank, op, lap // chunks * per_round + within))
    return slots


INTERLEAVED_1F1B = Schedule(
    name="interleaved-1f1b",
    description="1f1b with several chunks of the model per rank",
    program=interleaved_1f1b,
    synchronous=True,
)
