"""What connects the ranks of a pipeline: activations and gradients between stages.

`Links` has two forms: `DistributedLinks` between processes, and `InProcessLinks` between ranks that are
interleaved in one process (replay). The executor does not know which it has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from schedules.actions import Program
from schedules.messages import Message, sent_between_ranks
from stages.communicator import Communicator, Work
from stages.process import Process

POSTED_AHEAD = 2
"""Receives posted ahead on each edge and direction: one may arrive while another waits to be used."""


class Links(Protocol):
    """What a rank of a pipeline may ask of the others."""

    waits: bool
    """Whether `receive` waits by itself. If not, the caller lets other ranks go on until `arrived`."""
    most_buffers: int
    """Buffers for what other ranks send that were in use at once since `begin`, at most."""

    def begin(self, program: Program) -> None:
        """Make ready for the messages of a segment."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send without holding up the caller. `tensor` must not be written afterwards."""

    def arrived(self, message: Message) -> bool:
        """Whether `receive` can be served; asked only where `waits` is false."""

    def receive(self, message: Message) -> Tensor:
        """The tensor sent."""

    def release(self, tensor: Tensor) -> None:
        """Say that a received tensor is not read any more."""

    def finish(self) -> None:
        """End the segment, whether all of it was run or not: wait until everything sent has left, and leave
        no receive open."""


class InProcessLinks:
    """Links between ranks that take turns in one process."""

    waits = False
    most_buffers = 0

    def __init__(self) -> None:
        self._mail: dict[Message, Tensor] = {}

    def begin(self, program: Program) -> None:
        pass

    def send(self, message: Message, tensor: Tensor) -> None:
        self._mail[message] = tensor

    def arrived(self, message: Message) -> bool:
        return message in self._mail

    def receive(self, message: Message) -> Tensor:
        return self._mail.pop(message)

    def release(self, tensor: Tensor) -> None:
        pass

    def finish(self) -> None:
        if self._mail:
            raise RuntimeError(f"messages nobody received: {sorted(map(str, self._mail))}")


class _Channel(NamedTuple):
    """One direction of an edge, seen from one end."""

    peer: int
    """Rank at the other end."""
    forward: bool
    """Whether activations travel here; if not, gradients."""

    @classmethod
    def of(cls, message: Message, peer: int) -> _Channel:
        return cls(peer, forward=message.destination > message.source)


class DistributedLinks:
    """Links between processes, one a rank, over gloo (CPU) or NCCL (GPU).

    Each edge has one communicator a direction, since NCCL orders the operations of a communicator and a
    gradient must not wait for an activation.

    Args:
        process: this rank's.
        name: of the pipeline, which no other one of these processes has.
        members: the processes of its ranks, ascending, this one among them.
        rank_of_stage: which rank performs each stage.
        shape: of every activation and gradient.
        dtype: likewise.
    """

    waits = True

    def __init__(
        self,
        process: Process,
        *,
        name: str,
        members: Sequence[int],
        rank_of_stage: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._device = process.device
        self._members = members
        self._rank = members.index(process.rank)
        self._rank_of_stage = rank_of_stage
        self._shape = shape
        self._dtype = dtype
        self._groups = self._make_groups(process, name)
        self._local: dict[Message, Tensor] = {}
        self._coming: dict[_Channel, deque[Message]] = {}
        self._unsent: Counter[_Channel] = Counter()
        self._posted: dict[_Channel, dict[Message, tuple[Tensor, Work]]] = {}
        self._free: list[Tensor] = []
        self._owned: set[int] = set()
        self.most_buffers = 0
        """Buffers in use at once since `begin`, at most."""
        self._sent: deque[tuple[Tensor, Work]] = deque()

    def _make_groups(self, process: Process, name: str) -> dict[_Channel, Communicator]:
        neighbours = zip(self._rank_of_stage, self._rank_of_stage[1:], strict=False)
        edges = list(dict.fromkeys((min(edge), max(edge)) for edge in neighbours if edge[0] != edge[1]))
        groups = {}
        # The ends of an edge wait for each other. With every second one first, few ranks wait for more.
        for lower, upper in edges[::2] + edges[1::2]:
            if self._rank not in (lower, upper):
                continue
            peer = upper if self._rank == lower else lower
            for forward, carries in ((True, "activations"), (False, "gradients")):
                groups[_Channel(peer, forward)] = process.communicator(
                    f"{name} {carries} {lower}-{upper}", [self._members[lower], self._members[upper]]
                )
        return groups

    def begin(self, program: Program) -> None:
        self._coming, self._unsent = {}, Counter()
        self.most_buffers = 0
        mine = sent_between_ranks(program, by_or_to=self._rank)
        for (source, destination), messages in mine.items():
            if destination == self._rank:
                for message in messages:
                    self._coming.setdefault(_Channel.of(message, source), deque()).append(message)
            else:
                self._unsent.update(_Channel.of(message, destination) for message in messages)
        self._posted = {channel: {} for channel in self._coming}
        for channel in self._coming:
            for _ in range(POSTED_AHEAD):
                self._post(channel)

    def _post(self, channel: _Channel) -> None:
        if not self._coming[channel]:
            return
        message = self._coming[channel].popleft()
        buffer = self._free.pop() if self._free else self._new_buffer()
        self.most_buffers = max(self.most_buffers, len(self._owned) - len(self._free))
        work = self._groups[channel].recv([buffer], self._rank_in_pair(channel.peer), 0)
        self._posted[channel][message] = (buffer, work)

    def _rank_in_pair(self, peer: int) -> int:
        """Rank of `peer` in the communicator that this rank shares with it."""
        return int(peer > self._rank)

    def _new_buffer(self) -> Tensor:
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._owned.add(buffer.data_ptr())
        return buffer

    def send(self, message: Message, tensor: Tensor) -> None:
        peer = self._rank_of_stage[message.destination]
        if peer == self._rank:
            self._local[message] = tensor
            return
        self._send(_Channel.of(message, peer), tensor)
        # The oldest have long been used by the receiver, so this wait does not hold up compute.
        while len(self._sent) > 4 * len(self._members) + 64:
            self._sent.popleft()[1].wait()

    def _send(self, channel: _Channel, tensor: Tensor) -> None:
        work = self._groups[channel].send([tensor], self._rank_in_pair(channel.peer), 0)
        # What has left is let go of; the memory of up to all the sends of a segment would be held otherwise.
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        self._sent.append((tensor, work))
        self._unsent[channel] -= 1

    def arrived(self, message: Message) -> bool:
        return True

    def receive(self, message: Message) -> Tensor:
        peer = self._rank_of_stage[message.source]
        if peer == self._rank:
            return self._local.pop(message)
        channel = _Channel.of(message, peer)
        while message not in self._posted[channel]:
            self._post(channel)
        buffer, work = self._posted[channel].pop(message)
        work.wait()
        # No more than that: whoever sends knows how many receives are open when a segment is cut short.
        if len(self._posted[channel]) < POSTED_AHEAD:
            self._post(channel)
        return buffer

    def release(self, tensor: Tensor) -> None:
        # What came from a stage of this same rank is part of that stage's graph and is no buffer of ours.
        if tensor.data_ptr() in self._owned:
            self._free.append(tensor.detach())

    def finish(self) -> None:
        # Of a segment that was cut short the neighbours have posted receives that nothing was sent for. They
        # are served, not dropped: a receive that is left open keeps its buffer, and a GPU waits for it.
        for channel, left in list(self._unsent.items()):
            for _ in range(min(left, POSTED_AHEAD)):
                self._send(channel, torch.zeros(self._shape, dtype=self._dtype, device=self._device))
        while self._sent:
            self._sent.popleft()[1].wait()
        for posted in self._posted.values():
            for buffer, work in posted.values():
                work.wait()
                self._free.append(buffer)
            posted.clear()
