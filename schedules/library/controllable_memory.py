"""V-Half and V-Min: about a half and a third of 1F1B's activations ("Pipeline Parallelism with Controllable
Memory", arXiv 2405.15362, section 4).

Rank r holds stages r and 2 p - 1 - r and splits every backward. A step repeats a block of six units of time
per micro-batch (F, I and W of two stages, one unit each) and is flushed. A rank's activations live as long as
the block lasts from F to W: some 6 p units in V-Half and 4 p in V-Min, where those of 1F1B's first rank live
12 p; so they are those of p / 2 and p / 3 micro-batches over the rank's share of the model, and a constant.
"""

from __future__ import annotations

from collections import deque

from schedules.actions import Op, Program
from schedules.library.v_block import VBlock, v_block
from schedules.library.v_shape import placement
from schedules.schedule import Schedule
from schedules.segment import Segment, Slot, flushed


def v_half(segment: Segment) -> Program:
    """Rank r holds stages r and 2 p - 1 - r, and activations of about p / 2 micro-batches."""
    return _flushed(segment, schedule="v-half", block=half_block(segment.ranks))


def v_min(segment: Segment) -> Program:
    """Rank r holds stages r and 2 p - 1 - r, and activations of about p / 3 micro-batches.

    The block is the shortest there is: that of `2bw-v` with split backwards.
    """
    block = v_block(ranks=segment.ranks, forward=1, backward=1, weight=1, message=0)
    return _flushed(segment, schedule="v-min", block=block)


def half_block(ranks: int) -> VBlock:
    """The block of V-Half.

    From a rank to the next, forwards take 2 units towards the tip and 1 back, backwards likewise. Modulo 6
    these differ by 0 or 3 units from rank to rank, so no two actions of a rank meet if none do at rank 0:
    there F starts at 0 and 3 p - 2 and I at 3 p - 1 and, as p is odd or even, 6 p - 2 or 6 p + 1.
    """
    period, last = 6, 2 * ranks - 1
    forward, backward, weight = ([0] * (2 * ranks) for _ in range(3))
    for near in range(ranks):
        far = last - near
        forward[near], forward[far] = 2 * near, 3 * ranks - 2 - near
        backward[far] = 3 * ranks - 1 + 2 * near
        backward[near] = 6 * ranks - 2 + 3 * (ranks % 2 == 0) - near
        taken = {start % period for stage in (near, far) for start in (forward[stage], backward[stage])}
        one, other = (time for time in range(period) if time not in taken)
        waits = min(
            (
                [(start - backward[far] - 1) % period, (rest - backward[near] - 1) % period]
                for start, rest in ((one, other), (other, one))
            ),
            key=sum,
        )
        weight[far], weight[near] = backward[far] + 1 + waits[0], backward[near] + 1 + waits[1]
    return VBlock(
        period=period,
        forward=tuple(forward),
        backward=tuple(backward),
        weight=tuple(weight),
        lifetimes=tuple(end + 1 - start for start, end in zip(forward, weight, strict=True)),
    )


def _flushed(segment: Segment, *, schedule: str, block: VBlock) -> Program:
    return flushed(
        segment,
        schedule=schedule,
        rank_of_stage=placement(segment.ranks),
        order=_orders(block, ranks=segment.ranks, microbatches=segment.microbatches),
    )


def _orders(block: VBlock, *, ranks: int, microbatches: int) -> list[list[Slot]]:
    """Each rank's order in a step: that of the block, but weight halves fill the time in which a rank waits.

    After a rank's last forward nothing more comes in, so its input halves go first, as other ranks wait for
    them.
    """
    waiting = [_Rank(block, stages=(rank, 2 * ranks - 1 - rank), count=microbatches) for rank in range(ranks)]
    ends: dict[Slot, int] = {}
    time = 0
    while any(rank.left for rank in waiting):
        chosen = [slot for rank in waiting if (slot := rank.next(ends, time)) is not None]
        time += 1
        ends.update(dict.fromkeys(chosen, time))
    return [rank.done for rank in waiting]


class _Rank:
    """One rank, as time goes by unit by unit.

    Args:
        block: Of each micro-batch.
        stages: The rank's two stages.
        count: Micro-batches.
    """

    def __init__(self, block: VBlock, *, stages: tuple[int, int], count: int) -> None:
        assert block.weight is not None
        self.done: list[Slot] = []
        self._last_stage = len(block.forward) - 1
        rest, halves = [], []
        for stage in stages:
            for microbatch in range(count):
                begun = block.period * microbatch
                rest.append((begun + block.forward[stage], Slot(stage, Op.FORWARD, microbatch)))
                rest.append((begun + block.backward[stage], Slot(stage, Op.BACKWARD_INPUT, microbatch)))
                halves.append((begun + block.weight[stage], Slot(stage, Op.BACKWARD_WEIGHT, microbatch)))
        self._rest, self._halves = deque(sorted(rest)), deque(sorted(halves))
        self._forwards = 2 * count

    @property
    def left(self) -> bool:
        """Whether anything is left to do; a weight half is always last."""
        return bool(self._halves)

    def next(self, ends: dict[Slot, int], time: int) -> Slot | None:
        """What the rank begins at `time`; `ends` has what all ranks have ended."""
        due = bool(self._halves) and self._input_half_ended(ends, time)
        if self._rest and (not due or not self._forwards or self._rest[0] < self._halves[0]):
            _, slot = self._rest[0]
            if all(ends.get(needed, time + 1) <= time for needed in self._needed(slot)):
                self._rest.popleft()
                self._forwards -= slot.op is Op.FORWARD
                self.done.append(slot)
                return slot
        if due:
            _, slot = self._halves.popleft()
            self.done.append(slot)
            return slot
        return None

    def _input_half_ended(self, ends: dict[Slot, int], time: int) -> bool:
        _, half = self._halves[0]
        return ends.get(half._replace(op=Op.BACKWARD_INPUT), time + 1) <= time

    def _needed(self, slot: Slot) -> list[Slot]:
        if slot.op is Op.FORWARD:
            return [slot._replace(stage=slot.stage - 1)] if slot.stage > 0 else []
        needed = [slot._replace(op=Op.FORWARD)]
        if slot.stage < self._last_stage:
            needed.append(slot._replace(stage=slot.stage + 1))
        return needed


V_HALF = Schedule(
    name="v-half",
    description="two stages per rank in a V, flushed: half of 1f1b's activations, half its bubble",
    program=v_half,
    synchronous=True,
    stages_per_rank=2,
    ends_together=True,
    placement=placement,
)

V_MIN = Schedule(
    name="v-min",
    description="as v-half: a third of 1f1b's activations and two thirds of its bubble",
    program=v_min,
    synchronous=True,
    stages_per_rank=2,
    ends_together=True,
    placement=placement,
    planned=False,
)
