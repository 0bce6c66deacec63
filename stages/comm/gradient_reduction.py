"""Sums a stage's gradients over its data ranks, in rounds (`stages.comm.reduction_rounds`).

A round is packed, sent, received and summed in the order of the ranks. Rounds begin in the same order on all
data ranks, as their gradients become complete, because a communicator is a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import ge
from typing import NamedTuple

import torch
from torch import Tensor

from stages.comm.communicator import Communicator, Work
from stages.comm.reduction_rounds import UNDER_WAY, ReductionPlan, Round
from stages.shape.optimizer_sharding import Run


class Room(NamedTuple):
    """Buffers of one round."""

    sent: Tensor
    received: Tensor


class UnderWay(NamedTuple):
    """A round that has begun."""

    own: list[Tensor]
    """The tensors that the sums are written to."""
    received: Tensor
    """One row from each data rank."""
    work: Work
    room: Room


@dataclass(eq=False)
class RoundsOfAStage:
    """A requested reduction."""

    flat: Tensor
    rounds: Sequence[Round]
    part: Tensor | None
    """Where the sums are written, from its end on; None: to their place in `flat`."""
    whole: int = 0
    """Number of parameters, from the end of the model, whose gradients are complete."""
    begun: int = 0
    """Number of rounds begun."""
    added: int = 0
    """Number of rounds summed."""
    under_way: deque[UnderWay] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        return self.added == len(self.rounds)


class Reducer:
    """The reductions of one rank, in the order in which they were requested.

    Args:
        communicator: of the data ranks.
        rank: this rank's number among them.
        size: number of data ranks.
        device_waits: whether waiting for an exchange blocks the device and not the host, so that all rounds
            can be launched at once.
    """

    def __init__(self, communicator: Communicator, *, rank: int, size: int, device_waits: bool) -> None:
        self._communicator = communicator
        self._rank = rank
        self._size = size
        self._device_waits = device_waits
        self._asked: deque[RoundsOfAStage] = deque()
        self._rooms: list[Room] = []
        self._free: list[Room] = []

    def ask(self, flat: Tensor, plan: ReductionPlan, *, early: bool, part: Tensor | None) -> RoundsOfAStage:
        """Request a reduction that begins as the gradients in `flat` become complete."""
        self._make_room(plan, like=flat)
        asked = RoundsOfAStage(flat, plan.early_rounds if early else plan.rounds, part)
        self._asked.append(asked)
        return asked

    def _make_room(self, plan: ReductionPlan, *, like: Tensor) -> None:
        """Stages of one rank share the buffers, which are as large as the largest stage needs."""
        wanted = [plan.sent_entries(), plan.received_entries(self._rank)]
        held = [len(buffer) for buffer in self._rooms[0]] if self._rooms else [0, 0]
        if self._rooms and all(map(ge, held, wanted)):
            return
        while any(asked.under_way for asked in self._asked):
            self._add_oldest()
        sent, received = map(max, held, wanted)
        self._rooms = [Room(like.new_empty(sent), like.new_empty(received)) for _ in range(UNDER_WAY)]
        self._free = list(self._rooms)

    @property
    def room_bytes(self) -> int:
        """Bytes of the buffers that rounds are sent from and received into."""
        return sum(buffer.nbytes for room in self._rooms for buffer in room)

    def advance(self, asked: RoundsOfAStage, *, whole: int) -> None:
        """Set the number of complete gradients, and begin the rounds that can begin."""
        asked.whole = max(asked.whole, whole)
        self.go_on()

    def go_on(self, *, until: RoundsOfAStage | None = None) -> None:
        """Begin and sum rounds, as far as possible without waiting, or until one reduction is done."""
        while self._asked and not (until is not None and until.done):
            if self._begin_next():
                continue
            if not self._may_add(wait=until is not None):
                return
            self._add_oldest()

    def _begin_next(self) -> bool:
        """Begin the next round, and return True, if its gradients are complete and buffers are free."""
        asked = next((stage for stage in self._asked if stage.begun < len(stage.rounds)), None)
        if asked is None or not self._free:
            return False
        next_round = asked.rounds[asked.begun]
        if asked.whole < next_round.needs:
            return False
        room = self._free.pop(0)
        pieces = [runs_of(asked.flat, runs) for runs in next_round.pieces]
        sizes = [sum(map(len, piece)) for piece in pieces]
        own = sizes[self._rank]
        sent, received = room.sent[: sum(sizes)], room.received[: self._size * own]
        copied = [run for piece in pieces for run in piece]
        torch._foreach_copy_(list(torch.split(sent, list(map(len, copied)))), copied)
        work = self._communicator.alltoall_base(received, sent, [own] * self._size, sizes)
        rows = received.view(self._size, own)
        into = pieces[self._rank]
        if asked.part is not None:
            left = len(asked.part) - own
            into, asked.part = [asked.part[left:]], asked.part[:left]
        asked.under_way.append(UnderWay(into, rows, work, room))
        asked.begun += 1
        return True

    def _may_add(self, *, wait: bool) -> bool:
        oldest = next((stage for stage in self._asked if stage.under_way), None)
        if oldest is None:
            return False
        if self._device_waits:
            # Later work on the device waits for the sum, so it is launched as late as possible.
            return not self._free or oldest.begun == len(oldest.rounds)
        return wait or oldest.under_way[0].work.is_completed()

    def _add_oldest(self) -> None:
        asked = next(stage for stage in self._asked if stage.under_way)
        oldest = asked.under_way.popleft()
        oldest.work.wait()
        first, *others = oldest.received.unbind()
        add_up(first, others, into=oldest.own)
        self._free.append(oldest.room)
        asked.added += 1
        while self._asked and self._asked[0].done:
            self._asked.popleft()


def runs_of(flat: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """Views of some runs of a flat buffer."""
    return [flat[start:end] for start, end in runs]


def add_up(first: Tensor, others: Sequence[Tensor], *, into: Sequence[Tensor]) -> None:
    """Add `others` to `first` one after another and write the sum to `into`, one after another; overwrites
    `first`."""
    for part in others:
        first.add_(part)
    for target, part in zip(into, torch.split(first, list(map(len, into))), strict=True):
        target.copy_(part)
