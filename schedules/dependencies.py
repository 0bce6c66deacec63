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
from typing import TYPE_CHECKING, TypeAlias

from schedules.actions import Action, Op, Program
from schedules.messages import (
    Channel,
    Kind,
    Message,
    channel_ends,
    received,
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
    passages, _ = _walk(program, [rank], common_step=common_step)
    return {
        Message(*passage.channel, microbatch): place
        for passage in passages
        for microbatch, place in zip(passage.microbatches, passage.places, strict=False)
    }


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


def after_own_update(program: Program, rank: int) -> frozenset[Action]:
    """The actions of `rank` that wait for a message which depends on an update that `rank` has begun, and
    finishes only later: before such a wait it has to give its part of what all ranks exchange in that update.

    Args:
        program: As for `places_to_post`; all stages update together.
        rank: Performs the actions.
    """
    places = places_to_post(program, rank, common_step=True)
    return frozenset(
        action
        for number, action in enumerate(program.actions[rank])
        for message in received(action, program)
        if places.get(message, 0) > updated(number)
    )


_Queue: TypeAlias = "deque[np.ndarray]"


@dataclass(slots=True, eq=False)
class _Link:
    """One kind of message from a rank to another, numbered from 0 in the order in which they are sent."""

    sender: int
    receiver: int
    kind: Kind
    sent: int = 0
    arrived: int = 0
    """One more than the last of them that has arrived."""
    places: dict[int, Place] = field(default_factory=dict)
    """When receives may be posted, by number."""
    weight: int = 1
    """Weight of one message; the methods return sums of weights."""
    posted: int = 0
    """This and what follows count messages while `_most_messages` goes through the actions of a rank."""
    consumed: int = 0
    performed: int = 0
    gone: int = 0
    """Sends known to have arrived."""

    def post(self, place: Place) -> int:
        """Open the receives that may be open at `place`; returns what they weigh."""
        before = self.posted
        while self.may_post() and self.places[self.posted] <= place:
            self.posted += 1
        return (self.posted - before) * self.weight

    def may_post(self) -> bool:
        """Whether there is a receive to post, and room for it."""
        return self.posted - self.consumed < POSTED_AHEAD and self.posted < self.sent

    def post_until(self, number: int) -> int:
        """Open all receives up to this one; returns what the new ones weigh."""
        new = max(0, number + 1 - self.posted)
        self.posted += new
        return new * self.weight

    def release(self, count: int) -> int:
        """The first `count` sends have arrived; returns what those weigh that were not known to."""
        new = max(0, count - self.gone)
        self.gone += new
        return new * self.weight


@dataclass(slots=True, eq=False)
class _Passage:
    """A channel between two ranks, and its messages in their order, which is one at both ends."""

    channel: Channel
    link: _Link
    under_way: _Queue = field(default_factory=deque)
    """What those that are not received yet depend on."""
    microbatches: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Among all messages of the link."""
    shows: list[Sequence[tuple[_Link, int]]] = field(default_factory=list)
    """What their arrivals acknowledge: the first so many messages of these links."""
    places: list[Place] = field(default_factory=list)
    """When their receives may be posted, of ranks that are asked for."""


def _passages(program: Program) -> dict[tuple[int, Op], tuple[list[_Passage], list[_Queue], list[_Passage]]]:
    """Those that each op of a stage receives from, what is under way in them, and those that it sends to."""
    links: dict[tuple[int, int, Kind], _Link] = {}
    passages: dict[Channel, _Passage] = {}

    def crossing(channels: Sequence[Channel]) -> list[_Passage]:
        for channel in channels:
            ends = program.rank_of_stage[channel.source], program.rank_of_stage[channel.destination]
            if ends[0] != ends[1] and channel not in passages:
                link = links.setdefault((*ends, channel.kind), _Link(*ends, channel.kind))
                passages[channel] = _Passage(channel, link)
        return [passages[channel] for channel in channels if channel in passages]

    return {
        key: (
            receives := crossing(ends.receives),
            [passage.under_way for passage in receives],
            crossing(ends.sends),
        )
        for key, ends in channel_ends(program).items()
    }


def _walk(
    program: Program, ranks: Sequence[int], *, common_step: bool
) -> tuple[list[_Passage], dict[int, np.ndarray]]:
    """All messages between ranks, with the places to post those to some ranks, and `places_to_agree` as an
    array of theirs, in one pass: what work depends on is a place for each of them."""
    import numpy as np

    lag = steps_to_agree(program)
    none = np.zeros(len(ranks), dtype=np.int64)
    number_of = {rank: number for number, rank in enumerate(ranks)}
    finished: dict[int, np.ndarray] = {}
    for rank, own_number in number_of.items():
        for version, end in _finished_updates(program, rank).items():
            finished.setdefault(version, none.copy())[own_number] = end
    # Arrays are replaced, never written: messages keep those that they were sent with.
    depends = [none] * program.num_ranks
    passages = _passages(program)
    # By rank and neighbour: links of which more has arrived than messages to the neighbour show.
    unshown: list[dict[int, dict[_Link, None]]] = [{} for _ in depends]
    position = [0] * program.num_ranks
    merged = [-1] * program.num_ranks
    agreeing: dict[int, np.ndarray] = {}

    def up_to(number: int | None, depends: np.ndarray, *, actions: int) -> np.ndarray:
        """What work of a rank of `ranks` depends on once it has launched this many actions."""
        if number is None or depends[number] >= launched(actions):
            return depends
        both = depends.copy()
        both[number] = launched(actions)
        return both

    runnable = deque(range(program.num_ranks))
    queued = [True] * program.num_ranks
    while runnable:
        current = runnable.popleft()
        queued[current] = False
        number = number_of.get(current)
        actions, new = program.actions[current], unshown[current]
        place, own = position[current], depends[current]
        while place < len(actions):
            action = actions[place]
            receives, queues, sends = passages[action.stage, action.op]
            if not all(queues):
                break
            for passage in receives:
                link, index = passage.link, len(passage.numbers) - len(passage.under_way)
                dependency = passage.under_way.popleft()
                own = np.maximum(own, dependency)
                if number is not None:
                    passage.places.append(int(dependency[number]))
                if passage.numbers[index] >= link.arrived:
                    link.arrived = passage.numbers[index] + 1
                    new.setdefault(link.sender, {})[link] = None
            needed = version_awaited(action, program, common_step=common_step, lag=lag)
            if needed != merged[current]:
                merged[current] = needed
                if needed in finished:
                    own = np.maximum(own, finished[needed])
            if action.op is Op.UPDATE:
                agreeing[action.version] = np.maximum(
                    agreeing.get(action.version, none), up_to(number, own, actions=place)
                )
            place += 1
            if sends:
                given = up_to(number, own, actions=place)
                for passage in sends:
                    link = passage.link
                    passage.under_way.append(given)
                    passage.microbatches.append(action.microbatch)
                    passage.numbers.append(link.sent)
                    link.sent += 1
                    shown = new.pop(link.receiver, ())
                    passage.shows.append([(other, other.arrived) for other in shown])
                    if not queued[link.receiver]:
                        queued[link.receiver] = True
                        runnable.append(link.receiver)
        position[current], depends[current] = place, own
    return list({id(each): each for _, _, sends in passages.values() for each in sends}.values()), agreeing


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


def acknowledged(program: Program, rank: int) -> dict[Message, list[tuple[Kind, int]]]:
    """For each message to `rank`, the sends of `rank` that its arrival shows to have been received.

    Each entry is (kind, number received so far), counted in the order in which `rank` sends them to that
    neighbour; messages that show nothing new have none.
    """
    passages, _ = _walk(program, [], common_step=program.updates_together)
    return {
        Message(*passage.channel, microbatch): [(link.kind, count) for link, count in shown]
        for passage in passages
        if passage.link.receiver == rank
        for microbatch, shown in zip(passage.microbatches, passage.shows, strict=True)
        if shown
    }


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
    passages, _ = _walk(program, range(program.num_ranks), common_step=common_step)
    if weights is None:
        weights = dict.fromkeys(Kind, 1)
    # Of each op of a stage, the messages that it receives and sends: what they weigh, and the passage, or
    # None within a rank.
    of_channel = {passage.channel: passage for passage in passages}
    ends = {
        key: [[(weights[channel.kind], of_channel.get(channel)) for channel in each] for each in both]
        for key, both in channel_ends(program).items()
    }
    for passage in passages:
        passage.link.weight = weights[passage.link.kind]
        passage.link.places.update(zip(passage.numbers, passage.places, strict=True))
    links = {id(passage.link): passage.link for passage in passages}.values()
    return [
        _most_messages(actions, ends, [link for link in links if link.receiver == rank], in_flight)
        for rank, actions in enumerate(program.actions)
    ]


_EndsOf = Mapping[tuple[int, Op], Sequence[Sequence[tuple[int, _Passage | None]]]]


def _most_messages(
    actions: Sequence[Action], ends: _EndsOf, incoming: Sequence[_Link], in_flight: int
) -> int:
    """`most_messages` of a rank with these actions and links to it."""
    # By number of an action, the links of which a receive may be posted from there on.
    due: dict[int, list[_Link]] = {}
    for link in incoming:
        due.setdefault(link.places[0] // 2, []).append(link)
    read: dict[int, int] = {}
    now = most = 0
    for number, (stage, op, _, _) in enumerate(actions):
        here = updated(number)
        for link in due.pop(number, ()):
            now += link.post(here)
            if link.may_post():
                due.setdefault(link.places[link.posted] // 2, []).append(link)
        if now > most:
            most = now
        receives, sends = ends[stage, op]
        for weight, passage in receives:
            if passage is None:
                now -= weight
                continue
            link = passage.link
            index = read[id(passage)] = read.get(id(passage), -1) + 1
            now += link.post_until(passage.numbers[index])
            if now > most:
                most = now
            link.consumed += 1
            for sending, count in passage.shows[index]:
                now -= sending.release(count)
            now += link.post(here) - weight
            if link.may_post():
                due.setdefault(link.places[link.posted] // 2, []).append(link)
            if now > most:
                most = now
        for weight, passage in sends:
            now += weight
            if now > most:
                most = now
            if passage is not None:
                link = passage.link
                link.performed += 1
                if link.performed - in_flight > link.gone:
                    now -= link.release(link.performed - in_flight)
    return most
