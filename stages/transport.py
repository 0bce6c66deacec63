"""What connects the ranks of a pipeline: activations and gradients between stages.

`Links` has two forms: `DistributedLinks` between processes, and `InProcessLinks` between ranks that are
interleaved in one process (replay). The executor does not know which it has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from schedules.actions import Program
from schedules.dependencies import Place, acknowledged, places_to_post
from schedules.messages import Message, sent_between_ranks
from stages.communicator import Work
from stages.process import Process

_SENDER, _RECEIVER = 0, 1
"""Ranks in the communicator of a channel."""

POSTED_AHEAD = 2
"""Receives posted ahead on each channel: one may arrive while another waits to be used."""

UNACKNOWLEDGED = 8
"""Messages of a channel that a sender has under way, at most, where nothing tells it that they have arrived:
in a run of forwards alone."""


class Links(Protocol):
    """What a rank of a pipeline may ask of the others."""

    waits: bool
    """Whether `receive` waits by itself. If not, the caller lets other ranks go on until `arrived`."""
    most_buffers: int
    """Buffers for what other ranks send that were in use at once since `begin`, at most."""

    def connect(self) -> None:
        """Make every connection that a segment uses; all ranks do, before the first segment."""

    def begin(self, program: Program) -> None:
        """Make ready for the messages of a segment."""

    def passed(self, place: Place) -> None:
        """Say how far this rank has come in its actions; the host has launched all before."""

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

    def connect(self) -> None:
        pass

    def begin(self, program: Program) -> None:
        pass

    def passed(self, place: Place) -> None:
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
    """What one rank sends to another: activations or gradients, seen from one end."""

    peer: int
    """Rank at the other end."""
    forward: bool
    """Whether activations travel here; if not, gradients."""
    incoming: bool
    """Whether this end receives."""


class DistributedLinks:
    """Links between processes, one a rank, over gloo (CPU) or NCCL (GPU).

    Each channel has a communicator of its own, for one sender, since NCCL runs the operations of a
    communicator one after another: a gradient must not wait for an activation, nor what a rank sends for what
    it receives.

    Args:
        process: this rank's.
        name: of the pipeline, which no other one of these processes has.
        members: the processes of its ranks, ascending, this one among them.
        rank_of_stage: which rank performs each stage.
        shape: of every activation and gradient.
        dtype: likewise.
        common_step: whether all stages update together.
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
        common_step: bool,
    ) -> None:
        self._device = process.device
        self._rank = members.index(process.rank)
        self._rank_of_stage = rank_of_stage
        self._shape = shape
        self._dtype = dtype
        self._common_step = common_step
        self._groups = {
            channel: process.link(f"{name} {words}", [members[sender], members[receiver]])
            for channel, words, sender, receiver in self._channels()
        }
        self._local: dict[Message, Tensor] = {}
        self._place: Place = 0
        self._coming: dict[_Channel, deque[tuple[Place, Message]]] = {}
        self._unsent: Counter[_Channel] = Counter()
        self._acknowledged: Mapping[Message, list[tuple[bool, int]]] = {}
        self._posted: dict[_Channel, dict[Message, tuple[Tensor, Work]]] = {}
        self._free: list[Tensor] = []
        self._owned: set[int] = set()
        self.most_buffers = 0
        """Buffers in use at once since `begin`, at most."""
        self._sent: dict[_Channel, deque[tuple[Tensor, Work]]] = {}
        self._let_go: Counter[_Channel] = Counter()

    def _channels(self) -> Iterator[tuple[_Channel, str, int, int]]:
        """This rank's, with a name, sender and receiver: in one order on all ranks."""
        ranks = self._rank_of_stage
        neighbours = list(pairwise(ranks))
        edges = list(dict.fromkeys((min(edge), max(edge)) for edge in neighbours if edge[0] != edge[1]))
        # The ends of an edge wait for each other. With every second one first, few ranks wait for more.
        for lower, upper in edges[::2] + edges[1::2]:
            if self._rank not in (lower, upper):
                continue
            for sender, receiver in ((lower, upper), (upper, lower)):
                for forward, carries in ((True, "activations"), (False, "gradients")):
                    pair = (sender, receiver) if forward else (receiver, sender)
                    if pair in neighbours:
                        incoming = receiver == self._rank
                        channel = _Channel(sender if incoming else receiver, forward, incoming)
                        yield channel, f"{carries} {sender}-{receiver}", sender, receiver

    def connect(self) -> None:
        # The first operation between two ranks makes their connection, for which the host of a GPU waits
        # until the other end begins its own. With receives posted ahead of the first send it would wait for
        # ever.
        element = torch.zeros(1, dtype=self._dtype, device=self._device)
        for channel, communicator in self._groups.items():
            if channel.incoming:
                communicator.recv([element], _SENDER, 0).wait()
            else:
                communicator.send([element], _RECEIVER, 0).wait()

    def begin(self, program: Program) -> None:
        self._coming, self._unsent, self._place = {}, Counter(), 0
        self.most_buffers = 0
        self._acknowledged = acknowledged(program, self._rank)
        places = places_to_post(program, self._rank, common_step=self._common_step)
        mine = sent_between_ranks(program, by_or_to=self._rank)
        for (source, destination), messages in mine.items():
            for message in messages:
                if destination == self._rank:
                    channel = self._channel(message, source, incoming=True)
                    self._coming.setdefault(channel, deque()).append((places[message], message))
                else:
                    self._unsent[self._channel(message, destination, incoming=False)] += 1
        self._posted = {channel: {} for channel in self._coming}
        self._sent = {channel: deque() for channel in self._unsent}
        self._let_go = Counter()
        self.passed(0)

    def _channel(self, message: Message, peer: int, *, incoming: bool) -> _Channel:
        return _Channel(peer, message.destination > message.source, incoming)

    def passed(self, place: Place) -> None:
        self._place = place
        for channel in self._coming:
            self._post_ahead(channel)

    def _post_ahead(self, channel: _Channel) -> None:
        coming, posted = self._coming[channel], self._posted[channel]
        while coming and len(posted) < POSTED_AHEAD and coming[0][0] <= self._place:
            self._post(channel)

    def _post(self, channel: _Channel) -> None:
        _, message = self._coming[channel].popleft()
        buffer = self._free.pop() if self._free else self._new_buffer()
        self.most_buffers = max(self.most_buffers, len(self._owned) - len(self._free))
        work = self._groups[channel].recv([buffer], _SENDER, 0)
        self._posted[channel][message] = (buffer, work)

    def _new_buffer(self) -> Tensor:
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._owned.add(buffer.data_ptr())
        return buffer

    def send(self, message: Message, tensor: Tensor) -> None:
        peer = self._rank_of_stage[message.destination]
        if peer == self._rank:
            self._local[message] = tensor
            return
        channel = self._channel(message, peer, incoming=False)
        self._send(channel, tensor)
        # The oldest have long been used by the receiver, so this wait does not hold up compute.
        self._let_go_of(channel, keep=UNACKNOWLEDGED)

    def _send(self, channel: _Channel, tensor: Tensor) -> None:
        work = self._groups[channel].send([tensor], _RECEIVER, 0)
        self._sent[channel].append((tensor, work))
        self._unsent[channel] -= 1

    def _let_go_of(self, channel: _Channel, *, keep: int) -> None:
        """Let go of what was sent, but for the latest: its memory is held until its work is waited for."""
        sent = self._sent[channel]
        while len(sent) > keep:
            sent.popleft()[1].wait()
            self._let_go[channel] += 1

    def arrived(self, message: Message) -> bool:
        return True

    def receive(self, message: Message) -> Tensor:
        peer = self._rank_of_stage[message.source]
        if peer == self._rank:
            return self._local.pop(message)
        channel = self._channel(message, peer, incoming=True)
        while message not in self._posted[channel]:
            self._post(channel)
        buffer, work = self._posted[channel].pop(message)
        work.wait()
        for forward, count in self._acknowledged.get(message, ()):
            answered = _Channel(peer, forward, incoming=False)
            self._let_go_of(answered, keep=self._let_go[answered] + len(self._sent[answered]) - count)
        self._post_ahead(channel)
        return buffer

    def release(self, tensor: Tensor) -> None:
        # What came from a stage of this same rank is part of that stage's graph and is no buffer of ours.
        if tensor.data_ptr() in self._owned:
            self._free.append(tensor.detach())

    def finish(self) -> None:
        # Of a segment that was cut short the neighbours have posted receives that nothing was sent for. They
        # are served, not dropped: a receive that is left open keeps its buffer, and a GPU waits for it. How
        # many they have posted by then depends on where they were, so every channel is filled up first.
        for channel, coming in self._coming.items():
            while coming and len(self._posted[channel]) < POSTED_AHEAD:
                self._post(channel)
        for channel, left in list(self._unsent.items()):
            for _ in range(min(left, POSTED_AHEAD)):
                self._send(channel, torch.zeros(self._shape, dtype=self._dtype, device=self._device))
        for channel in self._sent:
            self._let_go_of(channel, keep=0)
        for posted in self._posted.values():
            for buffer, work in posted.values():
                work.wait()
                self._free.append(buffer)
            posted.clear()
