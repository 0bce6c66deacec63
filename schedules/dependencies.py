"""When a rank may post its receives, and which of its sends a message acknowledges.

On a GPU an open receive is a kernel that runs until its message arrives, and a host that synchronizes with
its device waits for that kernel too. If the message depends on work that this host has not launched yet, that
is a deadlock. So a receive is posted once everything of the same rank that its message depends on has been
launched. That follows from the program, whatever the ranks' speed.

A rank's progress is a `Place`: `launched(k)` once its first k actions have been launched, and
`updated(k)` once the updates that action k needs have been finished as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from schedules.actions import Action, Op, Program
from schedules.messages import (
    Channel,
    Ends,
    Kind,
    Message,
    MessagesByPair,
    channel_ends,
    is_local,
    received,
    sent,
    sent_between_ranks,
)

if TYPE_CHECKING:
    import numpy as np

POSTED_AHEAD = 2
"""Receives posted ahead on each channel: one may arrive while another waits to be consumed."""

Place = int
"""Progress of a rank through its actions; comparable."""


def launched(actions: int) -> Place:
    """The place of a rank that has launched its first `actions` actions."""
    return 2 * actions


def updated(action: int) -> Place:
    """The place of a rank that has finished the updates that its action number `action` needs, and launches
    that action next."""
    return 2 * action + 1


def steps_to_agree(program: Program) -> int:
    """Steps after which all ranks know, without waiting, what they sent each other at the end of a step.

    Where stages update on their own, stage 0 ends a step last; the last stage is less than 2 p micro-batches
    ahead of it.
    """
    return -(-(2 * program.num_ranks - 1) // program.microbatches)


def places_to_post(program: Program, rank: int, *, common_step: bool) -> dict[Message, Place]:
    """For each message from another rank: the place at which `rank` has launched everything of its own that
    the message depends on.

    Dependencies go through messages and updates: where all stages update together, whoever reads a version
    has received every rank's part of the gradient norm.

    Args:
        program: With complete forwards and backwards, and without deadlock.
        rank: Receives the messages.
        common_step: Whether all stages update together.
    """
    return _walk(program, [rank], common_step=common_step)[0][0]


def places_to_agree(program: Program, rank: int) -> dict[int, Place]:
    """For each version, the place at which `rank` has launched everything of its own that the other ranks'
    updates to it depend on: from there on an exchange that all ranks begin with that update completes.

    Where the head is in shards that may be after the rank's own update: its later forwards are needed for
    actions that come before another rank's update.

    Args:
        program: As for `places_to_post`; all stages update together.
        rank: Takes part in the exchange.
    """
    agreeing = _walk(program, [rank], common_step=True)[1]
    return {version: int(place) for version, (place,) in agreeing.items()}


def _walk(
    program: Program, ranks: Sequence[int], *, common_step: bool
) -> tuple[list[dict[Message, Place]], dict[int, np.ndarray]]:
    """`places_to_post` of some ranks, and `places_to_agree` as an array of theirs, in one pass: what work
    depends on is a place for each of them."""
    import numpy as np

    rank_of_stage, lag = program.rank_of_stage, steps_to_agree(program)
    none = np.zeros(len(ranks), dtype=np.int64)
    number_of = {rank: number for number, rank in enumerate(ranks)}
    finished: dict[int, np.ndarray] = {}
    for rank, own_number in number_of.items():
        for version, end in _finished_updates(program, rank).items():
            finished.setdefault(version, none.copy())[own_number] = end
    # Arrays are replaced, never written: messages keep those that they were sent with.
    depends = [none] * program.num_ranks
    # The messages of a channel are in one order at both ends.
    crossing = _crossing(program)
    channels: dict[Channel, deque[np.ndarray]] = {
        channel: deque() for ends in crossing.values() for channel in ends.sends
    }
    position = [0] * program.num_ranks
    merged = [-1] * program.num_ranks
    places: list[dict[Message, Place]] = [{} for _ in ranks]
    agreeing: dict[int, np.ndarray] = {}

    def up_to(rank: int, depends: np.ndarray, *, actions: int) -> np.ndarray:
        """What work of a rank depends on once it has launched this many actions."""
        if (number := number_of.get(rank)) is None:
            return depends
        both = depends.copy()
        both[number] = max(both[number], launched(actions))
        return both

    runnable = deque(range(program.num_ranks))
    while runnable:
        current = runnable.popleft()
        number = number_of.get(current)
        actions = program.actions[current]
        place, own = position[current], depends[current]
        while place < len(actions):
            action = actions[place]
            receives, sends = crossing[action.stage, action.op]
            if not all(map(channels.__getitem__, receives)):
                break
            for channel in receives:
                dependency = channels[channel].popleft()
                own = np.maximum(own, dependency)
                if number is not None:
                    message = Message(*channel, action.microbatch)
                    places[number][message] = int(dependency[number])
            needed = version_awaited(action, program, common_step=common_step, lag=lag)
            if needed != merged[current]:
                merged[current] = needed
                if needed in finished:
                    own = np.maximum(own, finished[needed])
            if action.op is Op.UPDATE:
                agreeing[action.version] = np.maximum(
                    agreeing.get(action.version, none), up_to(current, own, actions=place)
                )
            place += 1
            if sends:
                given = up_to(current, own, actions=place)
                for channel in sends:
                    channels[channel].append(given)
                    runnable.append(rank_of_stage[channel.destination])
        position[current], depends[current] = place, own
    return places, agreeing


def _crossing(program: Program) -> dict[tuple[int, Op], Ends]:
    """`channel_ends` without channels within a rank."""
    return {
        key: Ends(
            *(tuple(channel for channel in channels if not is_local(channel, program)) for channels in ends)
        )
        for key, ends in channel_ends(program).items()
    }


def version_awaited(action: Action, program: Program, *, common_step: bool, lag: int) -> int:
    """The version whose update all ranks must have begun before `action` can be performed.

    Args:
        action: To be performed.
        program: Its program.
        common_step: Whether all stages update together.
        lag: `steps_to_agree` of the program.
    """
    if common_step:
        # A rank has one update under way at a time.
        return action.version - (action.op is Op.UPDATE)
    if action.op is not Op.FORWARD:
        return -1
    # Ranks exchange whether to stop with the last update of a step, and use the answer `lag` steps later.
    step = action.microbatch // program.microbatches - lag
    return step * program.microbatches // program.update_interval


def _finished_updates(program: Program, rank: int) -> dict[int, Place]:
    """For each version that `rank` writes, the place by which it has finished that update."""
    stages = {stage for stage, holder in enumerate(program.rank_of_stage) if holder == rank}
    finished: dict[int, Place] = {}
    written: set[int] = set()
    pending: int | None = None
    for place, action in enumerate(program.actions[rank]):
        if pending is not None and (action.op is Op.UPDATE or action.version >= pending):
            finished[pending] = updated(place)
            pending = None
        if action.op is Op.UPDATE:
            written.add(action.stage)
            if written == stages:
                pending, written = action.version, set()
    if pending is not None:
        finished[pending] = updated(len(program.actions[rank]))
    return finished


MessageEnds = list[tuple[tuple[Message, ...], tuple[Message, ...]]]
"""For each action of a rank, the messages that it receives and those that it sends."""


def acknowledged(program: Program, rank: int) -> dict[Message, list[tuple[Kind, int]]]:
    """For each message to `rank`, the sends of `rank` that its arrival shows to have been received.

    Each entry is (kind, number received so far), counted in the order in which `rank` sends them to that
    neighbour; messages that show nothing new have none.
    """
    return _acknowledged(program.rank_of_stage, rank, _message_ends(program))


def _message_ends(program: Program) -> list[MessageEnds]:
    return [
        [(received(action, program), sent(action, program)) for action in actions]
        for actions in program.actions
    ]


def _acknowledged(
    rank_of_stage: Sequence[int], rank: int, ends: Sequence[MessageEnds]
) -> dict[Message, list[tuple[Kind, int]]]:
    numbers: dict[Message, int] = {}
    counts: dict[tuple[int, Kind], int] = {}
    for _, messages in ends[rank]:
        for message in messages:
            other = rank_of_stage[message.destination]
            if other != rank:
                counts[other, message.kind] = numbers[message] = counts.get((other, message.kind), 0) + 1
    known: dict[Message, list[tuple[Kind, int]]] = {}
    for other in {neighbour for neighbour, _ in counts}:
        arrived = dict.fromkeys(Kind, 0)
        reported = dict(arrived)
        new = False
        for incoming, outgoing in ends[other]:
            for message in incoming:
                if (number := numbers.get(message)) is not None and number > arrived[message.kind]:
                    arrived[message.kind] = number
                    new = True
            for message in outgoing:
                if new and rank_of_stage[message.destination] == rank:
                    known[message] = [
                        (kind, count) for kind, count in arrived.items() if count > reported[kind]
                    ]
                    reported, new = dict(arrived), False
    return known


def most_messages(
    program: Program, *, common_step: bool, in_flight: int, weights: Mapping[Kind, int] | None = None
) -> list[int]:
    """For each rank, the most messages that it holds at once: open receives, sends that no message from the
    receiver has acknowledged, and what one of its stages holds for another.

    Args:
        program: With complete forwards and backwards, and without deadlock.
        common_step: Whether all stages update together.
        in_flight: Sends of a kind to one rank that may wait unacknowledged
            (`schedules.deadlock.sends_in_flight`).
        weights: What a message of each kind counts, as its bytes; None: 1.
    """
    places, _ = _walk(program, range(program.num_ranks), common_step=common_step)
    by_pair = sent_between_ranks(program)
    ends = _message_ends(program)
    if weights is None:
        weights = dict.fromkeys(Kind, 1)
    return [
        _most_messages(program, rank, places[rank], by_pair, ends, in_flight, weights)
        for rank in range(program.num_ranks)
    ]


class _Channel:
    """One kind of message between two ranks, as one of them sees it while it performs its actions; numbers of
    messages are weighted."""

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.waiting: deque[Message] = deque()
        """Receives to post, in order."""
        self.ahead: set[Message] = set()
        """Posted and not consumed."""
        self.sends = self.gone = 0
        """Sends performed, and those known to have arrived."""

    def post(self, places: Mapping[Message, Place], place: Place) -> int:
        """Open the receives that may be open at `place`; returns how many."""
        before = len(self.ahead)
        while self.waiting and len(self.ahead) < POSTED_AHEAD and places[self.waiting[0]] <= place:
            self.ahead.add(self.waiting.popleft())
        return (len(self.ahead) - before) * self.weight

    def post_until(self, message: Message) -> int:
        """Open all receives up to `message`; returns how many."""
        before = len(self.ahead)
        while message not in self.ahead:
            self.ahead.add(self.waiting.popleft())
        return (len(self.ahead) - before) * self.weight

    def release(self, count: int) -> int:
        """The first `count` sends have arrived; returns how many were not known to."""
        new = max(0, count - self.gone)
        self.gone += new
        return new * self.weight


def _most_messages(
    program: Program,
    rank: int,
    places: Mapping[Message, Place],
    by_pair: MessagesByPair,
    ends: Sequence[MessageEnds],
    in_flight: int,
    weights: Mapping[Kind, int],
) -> int:
    rank_of_stage = program.rank_of_stage
    acknowledges = _acknowledged(rank_of_stage, rank, ends)
    to_rank: dict[tuple[int, Kind], _Channel] = {}
    from_rank: dict[tuple[int, Kind], _Channel] = {}
    for (sender, receiver), messages in by_pair.items():
        if rank not in (sender, receiver):
            continue
        channels, other = (to_rank, sender) if receiver == rank else (from_rank, receiver)
        for message in messages:
            channel = channels.setdefault((other, message.kind), _Channel(weights[message.kind]))
            if receiver == rank:
                channel.waiting.append(message)
    incoming_channels = list(to_rank.values())
    now = most = 0
    for number, (incoming, outgoing) in enumerate(ends[rank]):
        here = updated(number)
        for channel in incoming_channels:
            waiting = channel.waiting
            if waiting and len(channel.ahead) < POSTED_AHEAD and places[waiting[0]] <= here:
                now += channel.post(places, here)
        if now > most:
            most = now
        for message in incoming:
            sender = rank_of_stage[message.source]
            if sender == rank:
                now -= weights[message.kind]
                continue
            channel = to_rank[sender, message.kind]
            now += channel.post_until(message)
            if now > most:
                most = now
            channel.ahead.remove(message)
            for kind, count in acknowledges.get(message, ()):
                now -= from_rank[sender, kind].release(count)
            now += channel.post(places, here) - channel.weight
            if now > most:
                most = now
        for message in outgoing:
            now += weights[message.kind]
            if now > most:
                most = now
            receiver = rank_of_stage[message.destination]
            if receiver != rank:
                channel = from_rank[receiver, message.kind]
                channel.sends += 1
                if channel.sends - in_flight > channel.gone:
                    now -= channel.release(channel.sends - in_flight)
    return most
