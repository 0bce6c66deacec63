"""A model of hosts, streams and communicators: finds whether the recorded events of a run hang on GPUs.

The rules are NCCL's and CUDA's:

- A communicator runs its operations one at a time, in the order in which they were begun. A send completes
  when its receive is at the head of the peer's queue, a collective when it is at the head at all members. An
  operation waits for the earlier work of its rank's compute stream.
- The first operation of a kind with a peer may block the host until the peer begins its own.
- A host that synchronises its device waits for everything that it has launched, including open receives;
  one that allocates pinned memory may do so (older guides of CUDA list it).
- With NCCL's implicit order, operations start in the order of launches, whatever their communicator.
- With one hardware queue, work starts in the order of launches, whatever its stream; an operation that has
  started does not hold up what follows.
- With blocking waits, the host itself waits for an operation.

Events are performed as soon as they can be. No event disables another, so one order finds every hang.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schedules.dependencies import Place


class Operation(NamedTuple):
    """The host starts an exchange on a communicator."""

    number: int
    """Index among this rank's operations."""
    communicator: str
    kind: str
    peer: int | None
    """Process at the other end; None where all members take part."""
    size: int
    """Elements."""
    stream: str
    """Stream whose queued work it waits for."""
    parts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of an all-to-all: elements that it sends each member, and that it receives from each."""


class Wait(NamedTuple):
    """The host makes a stream wait for an operation."""

    number: int
    stream: str


class Mark(NamedTuple):
    """A point in a stream."""

    number: int
    """Index among this rank's marks."""
    stream: str


class WaitForMark(NamedTuple):
    """The host makes a stream wait for a mark."""

    number: int
    stream: str


class HostWait(NamedTuple):
    """The host itself waits for a mark."""

    number: int


class DeviceWait(NamedTuple):
    """The host waits until its device has nothing left to do."""

    reason: str


class At(NamedTuple):
    """The rank reaches this place of its actions."""

    place: Place


class Begin(NamedTuple):
    """A segment begins."""


class Use(NamedTuple):
    """A stream, or a communicator, reads or writes a part of a block of memory."""

    stream: str
    """The stream; the name of the communicator for its latest operation."""
    block: int
    start: int
    """Bytes from the start of the block."""
    end: int
    writes: bool
    by: str
    """Name of the operator."""


class Freed(NamedTuple):
    """The host drops its last reference to a block: later work of its stream may reuse the memory."""

    block: int
    stream: str
    """Stream that it was allocated on."""


Event = Use | Freed | DeviceWait | Operation | Wait | Mark | WaitForMark | HostWait | At | Begin

ACTIONS, UPDATES = "actions", "updates"
"""The streams of a rank."""


@dataclass
class Recording:
    """Events of all processes of a run."""

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each communicator."""
    events: list[list[Event]] = field(default_factory=list)
    """Events by process."""
    receives: list[dict[int, int]] = field(default_factory=list)
    """By process: action index by the operation index of the receive that it waited for."""


_ANSWERS = {"send": "recv", "recv": "send"}


def _fit(operations: Sequence[Operation]) -> bool:
    """Whether members of a communicator send what the others receive; they come in its order."""
    parts = [operation.parts for operation in operations if operation.parts is not None]
    if parts:
        return [*zip(*(sent for sent, _ in parts), strict=True)] == [received for _, received in parts]
    return len({operation.size for operation in operations}) == 1


@dataclass
class _Stream:
    items: list[Wait | Mark | WaitForMark] = field(default_factory=list)
    """Items queued."""
    passed: int = 0
    """Number of items passed."""


@dataclass
class _Rank:
    events: Sequence[Event]
    limit: int
    """Number of events that the host may perform."""
    host: int = 0
    streams: dict[str, _Stream] = field(default_factory=lambda: defaultdict(_Stream))
    marks: set[int] = field(default_factory=set)
    """Indices of the marks that have been passed."""
    queues: dict[str, list[tuple[Operation, int]]] = field(default_factory=lambda: defaultdict(list))
    """By communicator, each operation begun and the number of stream items that must pass before it."""
    heads: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    done: set[int] = field(default_factory=set)
    one_queue: bool = False
    launches: list[Operation | Wait | Mark | WaitForMark] = field(default_factory=list)
    """With one hardware queue, all work launched."""
    started: int = 0
    """Number of launches that have started."""
    latest: dict[str, int] = field(default_factory=dict)
    """By communicator, the latest operation that has started."""

    @property
    def is_idle(self) -> bool:
        """Whether its device has nothing left to do."""
        return all(stream.passed == len(stream.items) for stream in self.streams.values()) and all(
            self.heads[name] == len(queue) for name, queue in self.queues.items()
        )

    def compute(self) -> None:
        """Advance the streams as far as possible."""
        while self.one_queue and self.started < len(self.launches):
            item = self.launches[self.started]
            if isinstance(item, Operation):
                # Operations of a communicator follow each other on a stream of its own.
                if self.latest.get(item.communicator, -1) not in {-1, *self.done}:
                    return
                self.latest[item.communicator] = item.number
            elif self._passes(item):
                self.streams[item.stream].passed += 1
            else:
                return
            self.started += 1
        moved = not self.one_queue
        while moved:
            moved = False
            for stream in self.streams.values():
                while stream.passed < len(stream.items) and self._passes(stream.items[stream.passed]):
                    stream.passed += 1
                    moved = True

    def _passes(self, item: Wait | Mark | WaitForMark) -> bool:
        if isinstance(item, Mark):
            self.marks.add(item.number)
            return True
        return item.number in (self.done if isinstance(item, Wait) else self.marks)


class Streams:
    """The devices of all ranks.

    Args:
        recording: events of their hosts.
        connecting: whether the first operation of a kind with a peer blocks the host.
        computing: whether every host waits for its action stream at every place.
        one_queue: whether each device has one hardware queue.
        blocking: whether a wait for an operation blocks the host.
        in_order: whether operations of all communicators start in the order of launches.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        connecting: bool = True,
        computing: bool = False,
        one_queue: bool = False,
        blocking: bool = False,
        in_order: bool = False,
    ) -> None:
        self._in_order = in_order
        self._members = recording.members
        self._connecting = connecting
        self._computing = computing
        self._blocking = blocking
        self._begun: set[tuple[int, str, str, int | None]] = set()
        self.ranks = [_Rank(events, limit=len(events), one_queue=one_queue) for events in recording.events]
        self._dirty = set(range(len(self.ranks)))

    def settle(self) -> None:
        """Perform every event that can be performed."""
        while self._dirty:
            number = self._dirty.pop()
            rank = self.ranks[number]
            rank.compute()
            self._advance(number, rank)
            rank.compute()
            for name in list(rank.queues):
                self._run_queue(name)

    def allow(self, number: int, events: int) -> None:
        """Let the host of a rank perform its first `events` events."""
        self.ranks[number].limit = events
        self._dirty.add(number)

    def stuck(self) -> list[str]:
        """The ranks that have not finished, and their places."""
        return [
            f"process {number} at event {rank.host} of {len(rank.events)}"
            f" ({rank.events[rank.host] if rank.host < len(rank.events) else 'device'})"
            for number, rank in enumerate(self.ranks)
            if rank.host < len(rank.events) or not rank.is_idle
        ]

    def _advance(self, number: int, rank: _Rank) -> None:
        while rank.host < rank.limit:
            event = rank.events[rank.host]
            if isinstance(event, Operation):
                if self._connecting and not self._connects(number, event):
                    return
                rank.queues[event.communicator].append((event, len(rank.streams[event.stream].items)))
                rank.launches.append(event)
                rank.compute()
                self._dirty.update(self._members[event.communicator])
            elif isinstance(event, Wait | Mark | WaitForMark):
                if self._blocking and isinstance(event, Wait) and event.number not in rank.done:
                    return
                rank.streams[event.stream].items.append(event)
                rank.launches.append(event)
                rank.compute()
            elif isinstance(event, HostWait):
                rank.compute()
                if event.number not in rank.marks:
                    return
            elif isinstance(event, DeviceWait):
                rank.compute()
                if not rank.is_idle:
                    return
            elif self._computing and isinstance(event, At):
                rank.compute()
                stream = rank.streams[ACTIONS]
                if stream.passed < len(stream.items):
                    return
            else:
                assert isinstance(event, At | Begin)
            rank.host += 1

    def _connects(self, number: int, event: Operation) -> bool:
        """Whether every peer of a first operation has begun its own."""
        to_all = event.peer is None
        others = [member for member in self._members[event.communicator] if member != number]
        if not to_all:
            others = [event.peer]
        key = (number, event.communicator, event.kind, event.peer)
        if key not in self._begun:
            self._begun.add(key)
            self._dirty.update(others)
        answers = _ANSWERS.get(event.kind, event.kind)
        mine = None if to_all else number
        return all((other, event.communicator, answers, mine) in self._begun for other in others)

    def _run_queue(self, name: str) -> None:
        """Complete the operations that are at the head of the queues of all who take part in them."""
        members = self._members[name]
        while True:
            heads = {member: head for member in members if (head := self._head(member, name)) is not None}
            done = next((pair for pair in self._pairs(heads)), None)
            if done is None:
                if len(heads) < len(members) or len({head.kind for head in heads.values()}) > 1:
                    return
                if any(head.peer is not None for head in heads.values()):
                    return
                done = list(members)
            assert _fit([heads[member] for member in done]), f"{name}: {heads}"
            for member in done:
                self.ranks[member].heads[name] += 1
                self.ranks[member].done.add(heads[member].number)
                self._dirty.add(member)

    def _head(self, member: int, name: str) -> Operation | None:
        """The operation that a member of a communicator performs now."""
        rank = self.ranks[member]
        queue, head = rank.queues[name], rank.heads[name]
        if head == len(queue):
            return None
        operation, needs = queue[head]
        if rank.streams[operation.stream].passed < needs:
            return None
        if rank.one_queue and rank.latest.get(name) != operation.number:
            return None
        if self._in_order and not self._starts(member, operation):
            return None
        return operation

    def _starts(self, member: int, operation: Operation) -> bool:
        """Whether all operations that a rank has launched before have started."""
        rank = self.ranks[member]
        for earlier in rank.launches:
            if not isinstance(earlier, Operation) or earlier.number in rank.done:
                continue
            if earlier.number == operation.number:
                return True
            queue, head = rank.queues[earlier.communicator], rank.heads[earlier.communicator]
            first, needs = queue[head]
            if first.number != earlier.number or rank.streams[earlier.stream].passed < needs:
                return False
        return True

    def _pairs(self, heads: dict[int, Operation]) -> Iterator[list[int]]:
        """Members of which one sends what the other receives."""
        for member, head in heads.items():
            peer = None if head.peer is None else heads.get(head.peer)
            if head.kind == "send" and peer is not None and (peer.kind, peer.peer) == ("recv", member):
                yield [member, head.peer]


def hangs(recording: Recording, **rules: bool) -> list[str]:
    """The ranks that hang under these further rules of `Streams`."""
    streams = Streams(recording, **rules)
    streams.settle()
    return streams.stuck()


def hangs_where_one_syncs(recording: Recording, number: int) -> list[int]:
    """The events before which a device synchronisation of process `number` hangs.

    Its host stops there while all others go as far as they can.
    """
    streams = Streams(recording)
    hanging = []
    for place in range(len(recording.events[number]) + 1):
        streams.allow(number, place)
        streams.settle()
        rank = streams.ranks[number]
        assert rank.host == place, f"process {number} does not come to event {place}"
        if not rank.is_idle:
            hanging.append(place)
    return hanging


def hangs_where_two_sync(
    recording: Recording, first: int, second: int, *, stride: int = 1
) -> tuple[int, int]:
    """Number of pairs of places where synchronising both devices hangs, and number of pairs."""
    hanging = pairs = 0
    for place in range(0, len(recording.events[first]) + 1, stride):
        streams = Streams(recording)
        streams.allow(first, place)
        for other in range(0, len(recording.events[second]) + 1, stride):
            streams.allow(second, other)
            streams.settle()
            first_rank, second_rank = streams.ranks[first], streams.ranks[second]
            if first_rank.host < place:
                continue  # it does not come there before the other goes on
            pairs += 1
            if second_rank.host < other:
                break  # nor does the second one: it waits for the first
            hanging += not first_rank.is_idle and not second_rank.is_idle
    return hanging, pairs


def lead_of_receives(recording: Recording) -> list[int]:
    """For each receive of a segment, how many whole actions of the rank it was posted ahead."""
    leads = []
    for events, actions in zip(recording.events, recording.receives, strict=True):
        place = 0
        for event in events:
            if isinstance(event, At):
                place = event.place
            elif isinstance(event, Operation) and event.number in actions:
                leads.append(actions[event.number] - (place + 1) // 2)
    return leads


Clock = dict[str, int]
_HOST = "host"


def unordered(events: Sequence[Event]) -> list[str]:
    """The uses of memory that no event, wait or host orders after an earlier use by another stream, of which
    one writes, or after which memory is reused. By vector clocks of the host, streams and communicators."""
    clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
    marks: dict[int, Clock] = {}
    operations: dict[int, Clock] = {}
    communicators = {event.communicator for event in events if isinstance(event, Operation)}
    uses: dict[int, dict[tuple[str, int, int, bool], tuple[int, str]]] = defaultdict(dict)
    found: dict[str, None] = {}

    def launch(stream: str) -> Clock:
        return _join(clocks[stream], clocks[_HOST])

    for event in events:
        if isinstance(event, Mark):
            marks[event.number] = _snapshot(launch(event.stream), event.stream)
        elif isinstance(event, WaitForMark):
            _join(launch(event.stream), marks[event.number])
        elif isinstance(event, HostWait):
            _join(clocks[_HOST], marks[event.number])
        elif isinstance(event, Operation):
            name = event.communicator
            queue = _join(clocks[name], _snapshot(launch(event.stream), event.stream))
            queue[name] += 1
            # Whoever waits for it is after the uses that follow, which are the operation's.
            operations[event.number] = dict(queue) | {name: queue[name] + 1}
        elif isinstance(event, Wait):
            _join(launch(event.stream), operations[event.number])
        elif isinstance(event, Use):
            stream = event.stream
            clock = clocks[stream] if stream in communicators else launch(stream)
            of_block = uses[event.block]
            for (other, start, end, writes), (at, by) in of_block.items():
                overlap = start < event.end and event.start < end and (writes or event.writes)
                if other != stream and overlap and at >= clock[other]:
                    found[f"{event.by} on {stream} is not ordered after {by} on {other}"] = None
            of_block[stream, event.start, event.end, event.writes] = clock[stream], event.by
        elif isinstance(event, Freed):
            clock = launch(event.stream)
            for (other, *_), (at, by) in uses.pop(event.block, {}).items():
                if other != event.stream and at >= clock[other]:
                    found[f"memory of {event.stream} is freed while {by} on {other} may use it"] = None
    return list(found)


def _join(clock: Clock, other: Clock) -> Clock:
    for stream, at in other.items():
        clock[stream] = max(clock[stream], at)
    return clock


def _snapshot(clock: Clock, stream: str) -> Clock:
    """The clock of a stream, which then goes on: whoever has this clock is after all uses so far."""
    clock[stream] += 1
    return dict(clock)
