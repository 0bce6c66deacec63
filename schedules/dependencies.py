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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from schedules.actions import Action, Op, Program
from schedules.messages import (
    Channel,
    Ends,
    Kind,
    Message,
    channel_ends,
    is_local,
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


class _Sent(NamedTuple):
    """A message, as its sender knows it."""

    microbatch: int
    number: int
    """Among those of its kind to the same rank, in the order in which they are sent, from 0."""
    shows: list[tuple[Kind, int]]
    """What its arrival acknowledges; see `acknowledged`."""


def acknowledged(program: Program, rank: int) -> dict[Message, list[tuple[Kind, int]]]:
    """For each message to `rank`, the sends of `rank` that its arrival shows to have been received.

    Each entry is (kind, number received so far), counted in the order in which `rank` sends them to that
    neighbour; messages that show nothing new have none.
    """
    return {
        Message(*channel, message.microbatch): message.shows
        for channel, messages in _sent(program, _crossing(program)).items()
        if program.rank_of_stage[channel.destination] == rank
        for message in messages
        if message.shows
    }


def _sent(program: Program, crossing: Mapping[tuple[int, Op], Ends]) -> dict[Channel, list[_Sent]]:
    """All messages between ranks, by channel in the order in which they are sent, which is the one in which
    they are received."""
    rank_of_stage = program.rank_of_stage
    messages: dict[Channel, list[_Sent]] = {
        channel: [] for ends in crossing.values() for channel in ends.sends
    }
    for actions in program.actions:
        count: dict[tuple[int, Kind], int] = {}
        for stage, op, microbatch, _ in actions:
            for channel in crossing[stage, op].sends:
                link = rank_of_stage[channel.destination], channel.kind
                number = count.get(link, 0)
                count[link] = number + 1
                messages[channel].append(_Sent(microbatch, number, []))
    sent, received = ({channel: iter(of_one) for channel, of_one in messages.items()} for _ in range(2))
    for rank in range(program.num_ranks):
        # Of each neighbour: how many messages of each kind have arrived, and how many are reported.
        arrived: dict[int, dict[Kind, int]] = {}
        reported: dict[int, dict[Kind, int]] = {}
        unreported: set[int] = set()
        for stage, op, _, _ in program.actions[rank]:
            receives, sends = crossing[stage, op]
            for channel in receives:
                other, number = rank_of_stage[channel.source], next(received[channel]).number + 1
                counts = arrived.get(other)
                if counts is None:
                    counts = arrived[other] = dict.fromkeys(Kind, 0)
                    reported[other] = dict(counts)
                if number > counts[channel.kind]:
                    counts[channel.kind] = number
                    unreported.add(other)
            for channel in sends:
                message, other = next(sent[channel]), rank_of_stage[channel.destination]
                if other in unreported:
                    counts, known = arrived[other], reported[other]
                    message.shows.extend(
                        (kind, count) for kind, count in counts.items() if count > known[kind]
                    )
                    known.update(counts)
                    unreported.remove(other)
    return messages


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
    if weights is None:
        weights = dict.fromkeys(Kind, 1)
    messages = {channel: iter(of_one) for channel, of_one in _sent(program, _crossing(program)).items()}
    return [
        _most_messages(
            program,
            rank,
            [
                (message, place, next(messages[Channel(*message[:3])]))
                for message, place in places[rank].items()
            ],
            in_flight,
            weights,
        )
        for rank in range(program.num_ranks)
    ]


@dataclass(slots=True)
class _Link:
    """One kind of message between two ranks, as one of them sees it while it performs its actions; numbers of
    messages are weighted where they are returned."""

    weight: int
    places: dict[int, Place] = field(default_factory=dict)
    """By number of a message to receive, when its receive may be posted."""
    posted: int = 0
    consumed: int = 0
    sends: int = 0
    gone: int = 0
    """Sends known to have arrived."""

    def post(self, place: Place) -> int:
        """Open the receives that may be open at `place`; returns how many."""
        before = self.posted
        while self.may_post() and self.places[self.posted] <= place:
            self.posted += 1
        return (self.posted - before) * self.weight

    def may_post(self) -> bool:
        """Whether there is a receive to post, and room for it."""
        return self.posted - self.consumed < POSTED_AHEAD and self.posted < len(self.places)

    def post_until(self, number: int) -> int:
        """Open all receives up to this one; returns how many."""
        new = max(0, number + 1 - self.posted)
        self.posted += new
        return new * self.weight

    def release(self, count: int) -> int:
        """The first `count` sends have arrived; returns how many were not known to."""
        new = max(0, count - self.gone)
        self.gone += new
        return new * self.weight


def _most_messages(
    program: Program,
    rank: int,
    received: Sequence[tuple[Message, Place, _Sent]],
    in_flight: int,
    weights: Mapping[Kind, int],
) -> int:
    """`most_messages` of a rank; `received`: what it receives from others, in order, and when it may post
    that."""
    rank_of_stage = program.rank_of_stage
    ends = channel_ends(program)
    to_rank: dict[tuple[int, Kind], _Link] = {}
    from_rank: dict[tuple[int, Kind], _Link] = {}
    for message, place, sent in received:
        key = rank_of_stage[message.source], message.kind
        if (link := to_rank.get(key)) is None:
            link = to_rank[key] = _Link(weights[message.kind])
        link.places[sent.number] = place
    # By number of an action, the links of which a receive may be posted from there on.
    due: dict[int, list[_Link]] = {}

    def wait_to_post(link: _Link) -> None:
        if link.may_post():
            due.setdefault(link.places[link.posted] // 2, []).append(link)

    for link in to_rank.values():
        wait_to_post(link)
    arriving = iter(received)
    now = most = 0
    for number, (stage, op, _, _) in enumerate(program.actions[rank]):
        here = updated(number)
        for link in due.pop(number, ()):
            now += link.post(here)
            wait_to_post(link)
        if now > most:
            most = now
        incoming, outgoing = ends[stage, op]
        for channel in incoming:
            sender = rank_of_stage[channel.source]
            if sender == rank:
                now -= weights[channel.kind]
                continue
            _, _, sent = next(arriving)
            link = to_rank[sender, channel.kind]
            now += link.post_until(sent.number)
            if now > most:
                most = now
            link.consumed += 1
            for kind, count in sent.shows:
                now -= from_rank[sender, kind].release(count)
            now += link.post(here) - link.weight
            wait_to_post(link)
            if now > most:
                most = now
        for channel in outgoing:
            now += weights[channel.kind]
            if now > most:
                most = now
            receiver = rank_of_stage[channel.destination]
            if receiver != rank:
                if (sending := from_rank.get((receiver, channel.kind))) is None:
                    sending = from_rank[receiver, channel.kind] = _Link(weights[channel.kind])
                sending.sends += 1
                now -= sending.release(sending.sends - in_flight)
    return most
