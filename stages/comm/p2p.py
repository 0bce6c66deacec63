"""Point-to-point messages between the ranks of a pipeline: activations and their gradients.

`Links` has two forms: `DistributedLinks` between processes, and `InProcessLinks` between the ranks of a
replay. The executor does not know which it has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from schedules.actions import Action, Program
from schedules.deadlock import sends_in_flight
from schedules.dependencies import POSTED_AHEAD, Place, acknowledged, places_to_post
from schedules.messages import IN_ONE, Kind, Message, channels_between_ranks, sent_between_ranks
from stages.comm.communicator import Communicator, Work
from stages.comm.process import Process
from stages.liveness.watchdog import Waiting
from stages.shape.activations import message_width

_SENDER, _RECEIVER = 0, 1
"""Numbers in the communicator of a channel."""
_CARRIED = {kind: str(kind) for kind in Kind} | {Kind.GRADIENT: "gradients", Kind.PART: "parts of the head"}
_MADE_BY = {
    Kind.ACTIVATIONS: "F",
    Kind.GRADIENT: "B",
    Kind.HIDDEN: "F",
    Kind.PART: "S",
    Kind.SUMS: "B",
    Kind.EMBEDDED: "E",
    Kind.OF_EMBEDDED: "B",
}
"""The op that sends a message."""


class Links(Protocol):
    """A rank's messages to and from the other ranks of its pipeline."""

    waits: bool
    """Whether `receive` blocks. If not, the caller lets other ranks run until `arrived`."""
    most_message_bytes: int
    """Peak bytes of messages held since `begin`: open receives, sends that are not known to have arrived, and
    what one stage of this rank holds for another."""

    waited_for: Callable[[], Waiting] | None
    """Describes what the latest `receive` waited for; on a GPU the device may still wait for it. None: for
    nothing."""

    def waiting(self) -> Waiting | None:
        """What this rank's host waits for now, if anything; called from another thread."""

    def connect(self) -> None:
        """Connect every channel; all ranks call this before the first segment."""

    def begin(self, program: Program) -> None:
        """Prepare for the messages of a segment."""

    def passed(self, place: Place) -> None:
        """Tell which place of the program this rank has reached: everything before it has been launched."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send without blocking. `tensor` must not be written afterwards."""

    def send_all(self, messages: Sequence[Message], tensor: Tensor) -> None:
        """Send one tensor as all of these messages of an action, as `send` does."""

    def arrived(self, message: Message) -> bool:
        """Whether the message can be received now; called only where `waits` is false."""

    def receive(self, message: Message) -> Tensor:
        """The tensor that was sent."""

    def finish(self) -> None:
        """End the segment, complete or cut short: wait for all sends, and leave no receive open."""


class InProcessLinks:
    """Links between the ranks of a replay."""

    waits = False
    most_message_bytes = 0
    waited_for: Callable[[], Waiting] | None = None

    def __init__(self) -> None:
        self._mail: dict[Message, Tensor] = {}

    def waiting(self) -> Waiting | None:
        return None

    def connect(self) -> None:
        pass

    def begin(self, program: Program) -> None:
        pass

    def passed(self, place: Place) -> None:
        pass

    def send(self, message: Message, tensor: Tensor) -> None:
        self._mail[message] = tensor

    def send_all(self, messages: Sequence[Message], tensor: Tensor) -> None:
        for message in messages:
            self.send(message, tensor)

    def arrived(self, message: Message) -> bool:
        return message in self._mail

    def receive(self, message: Message) -> Tensor:
        return self._mail.pop(message)

    def finish(self) -> None:
        if self._mail:
            raise RuntimeError(f"messages that no rank received: {sorted(map(str, self._mail))}")


class _Channel(NamedTuple):
    """One direction and kind of message between two ranks, seen from one end."""

    peer: int
    """Rank at the other end."""
    kind: Kind
    incoming: bool
    """Whether this end receives."""


class _Launch:
    """Messages of a communicator that begin in one launch, beside each other; whoever waits for one of them
    waits for all."""

    def __init__(self) -> None:
        self.work: Work | None = None

    def is_completed(self) -> bool:
        return self.work is not None and self.work.is_completed()

    def wait(self) -> object:
        assert self.work is not None
        return self.work.wait()


class _End(NamedTuple):
    """This rank's end of a channel."""

    communicator: Communicator
    peer: int
    """Number of the other end in it."""


class DistributedLinks:
    """Links between processes, one per rank, over gloo (CPU) or NCCL (GPU).

    Each channel has its own communicator with one sender. NCCL runs the operations of a communicator one
    after another, and a gradient must not wait for an activation, nor a send for a receive. Messages between
    one rank and all others share one where they may take turns (`schedules.messages.IN_ONE`).

    Args:
        process: this rank's.
        program: of any segment: who performs which stage is the same in all.
        name: of the pipeline, unique among these processes.
        members: the processes of the pipeline's ranks, ascending, this one among them.
        shape: of every activation and activation gradient.
        dtype: of all messages.
        common_step: whether all stages update together.
    """

    waits = True

    def __init__(
        self,
        process: Process,
        program: Program,
        *,
        name: str,
        members: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        common_step: bool,
    ) -> None:
        self._device = process.device
        self._launches_together = process.device_waits
        self._launch: _Launch | None = None
        self._rank = members.index(process.rank)
        self._members = members
        self._rank_of_stage = program.rank_of_stage
        per_wide = torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize
        self._shapes = {
            kind: (*shape[:-1], message_width(kind, width=shape[-1], per_wide=per_wide)) for kind in Kind
        }
        self._bytes = {kind: prod(own) * dtype.itemsize for kind, own in self._shapes.items()}
        self._dtype = dtype
        self._common_step = common_step
        self._ends = self._make_ends(process, program, name=name)
        self._from_this_rank: dict[Message, Tensor] = {}
        self._place: Place = 0
        self._to_post: dict[_Channel, deque[tuple[Place, Message]]] = {}
        self._unsent: Counter[_Channel] = Counter()
        self._acknowledged: Mapping[Message, list[tuple[Kind, int]]] = {}
        self._actions: Sequence[Action] = ()
        self._waiting: Callable[[], Waiting] | None = None
        self.waited_for: Callable[[], Waiting] | None = None
        """Describes what the latest `receive` waited for; None: for nothing."""
        self._posted: dict[_Channel, dict[Message, tuple[Tensor, Work, Place]]] = {}
        self._from_all: Sequence[_Channel] = ()
        """Channels from all other ranks, of whose messages this one needs all at once."""
        self.most_message_bytes = 0
        """Peak bytes of messages held since `begin`."""
        self._sent: dict[_Channel, deque[tuple[Tensor, Work]]] = {}
        self._released: Counter[_Channel] = Counter()

    def _make_ends(self, process: Process, program: Program, *, name: str) -> dict[_Channel, _End]:
        """This rank's ends, in an order in which all ranks can connect them."""
        channels = list(self._channels(program))
        ends = {}
        for channel, label, sender, receiver in channels:
            if channel.kind not in IN_ONE:
                link = process.link(f"{name} {label}", [self._members[sender], self._members[receiver]])
                ends[channel] = _End(link, _SENDER if channel.incoming else _RECEIVER)
        # All ranks take part in each of these, so they come after those of pairs.
        for kind in IN_ONE:
            if own := [channel for channel, *_ in channels if channel.kind is kind]:
                link = process.link(f"{name} {_CARRIED[kind]}", self._members)
                ends |= {channel: _End(link, channel.peer) for channel in own}
        return ends

    def _channels(self, program: Program) -> Iterator[tuple[_Channel, str, int, int]]:
        """This rank's channels with name, sender and receiver, in the same order on all ranks."""
        ranks, blocks = program.rank_of_stage, program.loss_stage + 1
        tied = program.tied_shards
        crossing = channels_between_ranks(ranks, head_shards=program.head_shards, tied_shards=tied)
        edges = list(dict.fromkeys((min(edge), max(edge)) for edge in pairwise(ranks[:blocks])))
        # The two ends of an edge wait for each other. Every second edge comes first, so they connect in
        # parallel. Those between the last stage, or the first, and the shards of the head come after all.
        centres = (ranks[blocks - 1], ranks[0]) if tied else (ranks[blocks - 1],)
        star = [(min(edge), max(edge)) for edge in product(centres, ranks[blocks:])]
        for lower, upper in dict.fromkeys(edges[::2] + edges[1::2] + star):
            if self._rank not in (lower, upper):
                continue
            for sender, receiver in ((lower, upper), (upper, lower)):
                for kind in Kind:
                    if (sender, receiver, kind) in crossing:
                        incoming = receiver == self._rank
                        channel = _Channel(sender if incoming else receiver, kind, incoming)
                        yield channel, f"{_CARRIED[kind]} {sender}-{receiver}", sender, receiver

    def waiting(self) -> Waiting | None:
        waiting = self._waiting
        return None if waiting is None else waiting()

    def _wait(self, work: Work, waiting: Callable[[], Waiting]) -> None:
        """Wait for an operation.

        Raises:
            RuntimeError: it failed or timed out; names what was waited for.
        """
        self._waiting = waiting
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{waiting().text}: {error}") from error
        self._waiting = None

    def _waiting_for(self, message: Message, peer: int, posted: Place) -> Waiting:
        sender = self._members[peer]
        kind = _MADE_BY[message.kind]
        done = posted // 2
        where = f"before {self._actions[done]}" if done < len(self._actions) else "at the end of the segment"
        text = f"waits for {kind}{message.microbatch} of stage {message.source} from rank {sender}"
        return Waiting(f"{text} (receive posted {where})", sender)

    def _waiting_to_send(self, channel: _Channel) -> Waiting:
        receiver = self._members[channel.peer]
        return Waiting(f"waits for rank {receiver} to receive {_CARRIED[channel.kind]}", receiver)

    def connect(self) -> None:
        # With NCCL the first operation between two ranks connects them, and blocks the host until the peer
        # begins its own. With receives posted ahead of the first send both would wait forever.
        element = torch.zeros(1, dtype=self._dtype, device=self._device)
        for channel, (communicator, peer) in self._ends.items():
            exchange = communicator.recv if channel.incoming else communicator.send
            exchange([element], peer, 0).wait()

    def begin(self, program: Program) -> None:
        self._to_post, self._unsent, self._place = {}, Counter(), 0
        self._actions = program.actions[self._rank]
        self.most_message_bytes = 0
        self._in_flight = sends_in_flight(program)
        self._acknowledged = acknowledged(program, self._rank)
        places = places_to_post(program, self._rank, common_step=self._common_step)
        by_edge = sent_between_ranks(program, by_or_to=self._rank)
        for (source, destination), messages in by_edge.items():
            for message in messages:
                if destination == self._rank:
                    channel = _Channel(source, message.kind, incoming=True)
                    self._to_post.setdefault(channel, deque()).append((places[message], message))
                else:
                    self._unsent[_Channel(destination, message.kind, incoming=False)] += 1
        self._posted = {channel: {} for channel in self._to_post}
        self._from_all = [channel for channel in self._to_post if channel.kind is Kind.PART]
        self._sent = {channel: deque() for channel in self._unsent}
        self._released = Counter()
        self.passed(0)

    def passed(self, place: Place) -> None:
        self._place = place
        for channel in self._to_post:
            if channel not in self._from_all:
                self._post_ahead(channel)
        # One micro-batch after the other, each from all ranks at once.
        while ready := list(filter(self._may_post, self._from_all)):
            with self._in_one_launch(ready[0].kind):
                for channel in ready:
                    self._post(channel)

    def _may_post(self, channel: _Channel) -> bool:
        to_post, posted = self._to_post[channel], self._posted[channel]
        return len(to_post) > 0 and len(posted) < POSTED_AHEAD and to_post[0][0] <= self._place

    def _post_ahead(self, channel: _Channel) -> None:
        while self._may_post(channel):
            self._post(channel)

    @contextmanager
    def _in_one_launch(self, kind: Kind) -> Iterator[None]:
        """A block whose messages of one kind begin together, where NCCL would have each wait for the one
        before it."""
        if kind not in IN_ONE or not self._launches_together:
            yield
            return
        nccl: Any = next(end.communicator for channel, end in self._ends.items() if channel.kind is kind)
        self._launch = launch = _Launch()
        nccl._start_coalescing()
        yield
        launch.work = nccl._end_coalescing()
        self._launch = None

    def _post(self, channel: _Channel) -> None:
        _, message = self._to_post[channel].popleft()
        buffer = torch.empty(self._shapes[channel.kind], dtype=self._dtype, device=self._device)
        communicator, peer = self._ends[channel]
        work = communicator.recv([buffer], peer, 0)
        work = self._launch or work
        self._posted[channel][message] = (buffer, work, self._place)
        self._count()

    def _count(self) -> None:
        held = sum(self._bytes[message.kind] for message in self._from_this_rank)
        for channels in (self._posted, self._sent):
            held += sum(self._bytes[channel.kind] * len(messages) for channel, messages in channels.items())
        self.most_message_bytes = max(self.most_message_bytes, held)

    def send_all(self, messages: Sequence[Message], tensor: Tensor) -> None:
        for kind in dict.fromkeys(message.kind for message in messages):
            own = [message for message in messages if message.kind is kind]
            with self._in_one_launch(kind) if len(own) > 1 else nullcontext():
                for message in own:
                    self.send(message, tensor)

    def send(self, message: Message, tensor: Tensor) -> None:
        peer = self._rank_of_stage[message.destination]
        if peer == self._rank:
            self._from_this_rank[message] = tensor
            self._count()
            return
        channel = _Channel(peer, message.kind, incoming=False)
        self._send(channel, tensor)
        # The receiver has long consumed the oldest sends, so this wait does not delay compute.
        self._release_sends(channel, keep=self._in_flight)

    def _send(self, channel: _Channel, tensor: Tensor) -> None:
        communicator, peer = self._ends[channel]
        work = communicator.send([tensor], peer, 0)
        work = self._launch or work
        self._sent[channel].append((tensor, work))
        self._unsent[channel] -= 1
        self._count()

    def _release_sends(self, channel: _Channel, *, keep: int) -> None:
        """Wait for all but the `keep` latest sends: gloo holds a sent tensor until its work is waited for."""
        sent = self._sent[channel]
        while len(sent) > keep:
            self._wait(sent.popleft()[1], partial(self._waiting_to_send, channel))
            self._released[channel] += 1

    def arrived(self, message: Message) -> bool:
        return True

    def receive(self, message: Message) -> Tensor:
        peer = self._rank_of_stage[message.source]
        self.waited_for = None
        if peer == self._rank:
            return self._from_this_rank.pop(message)
        channel = _Channel(peer, message.kind, incoming=True)
        while message not in self._posted[channel]:
            self._post(channel)
        buffer, work, posted = self._posted[channel].pop(message)
        self.waited_for = partial(self._waiting_for, message, peer, posted)
        self._wait(work, self.waited_for)
        for kind, count in self._acknowledged.get(message, ()):
            outgoing = _Channel(peer, kind, incoming=False)
            self._release_sends(outgoing, keep=self._released[outgoing] + len(self._sent[outgoing]) - count)
        if channel not in self._from_all:
            self._post_ahead(channel)
        return buffer

    def finish(self) -> None:
        # When a segment is cut short, the neighbours have receives posted that nothing was sent for. Zeros
        # are sent for them, since an open receive keeps its buffer and blocks device syncs. How many are
        # posted depends on where each rank stopped, so every channel is first filled up to POSTED_AHEAD.
        for channel, to_post in self._to_post.items():
            while to_post and len(self._posted[channel]) < POSTED_AHEAD:
                self._post(channel)
        for channel, left in list(self._unsent.items()):
            for _ in range(min(left, POSTED_AHEAD)):
                nothing = torch.zeros(self._shapes[channel.kind], dtype=self._dtype, device=self._device)
                self._send(channel, nothing)
        for channel in self._sent:
            self._release_sends(channel, keep=0)
        for posted in self._posted.values():
            for _, work, _ in posted.values():
                work.wait()
            posted.clear()
