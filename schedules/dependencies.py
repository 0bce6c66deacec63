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
from collections.abc import Iterator, Mapping

from schedules.actions import Action, Op, Program
from schedules.messages import Message, destination, is_local, received, sent, sent_between_ranks, source

POSTED_AHEAD = 2
"""Receives posted ahead on each channel: one may arrive while another waits to be consumed."""

UNACKNOWLEDGED = 8
"""Most sends in flight per channel that no message from the receiver acknowledges, as in a fill or an
evaluation."""

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
    rank_of_stage, num_stages = program.rank_of_stage, program.num_stages
    finished = _finished_updates(program, rank)
    lag = steps_to_agree(program)
    # For each rank, the last place of `rank` that its work depends on; for each channel, those of its
    # messages, which are in one order at both ends.
    depends = [0] * program.num_ranks
    channels: dict[tuple[int, int], deque[Place]] = {
        (stage, stage + way): deque() for stage in range(num_stages) for way in (-1, 1)
    }
    position = [0] * program.num_ranks
    places: dict[Message, Place] = {}
    runnable = deque(range(program.num_ranks))
    while runnable:
        current = runnable.popleft()
        actions = program.actions[current]
        place = position[current]
        while place < len(actions):
            action = actions[place]
            sender = source(action, num_stages)
            if sender is not None and rank_of_stage[sender] != current:
                channel = channels[sender, action.stage]
                if not channel:
                    break
                dependency = channel.popleft()
                depends[current] = max(depends[current], dependency)
                if current == rank:
                    places[Message(sender, action.stage, action.microbatch)] = dependency
            needed = version_awaited(action, program, common_step=common_step, lag=lag)
            depends[current] = max(depends[current], finished.get(needed, 0))
            place += 1
            if current == rank:
                depends[current] = launched(place)
            receiver = destination(action, num_stages)
            if receiver is not None and rank_of_stage[receiver] != current:
                channels[action.stage, receiver].append(depends[current])
                runnable.append(rank_of_stage[receiver])
        position[current] = place
    return places


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


def acknowledged(program: Program, rank: int) -> dict[Message, list[tuple[bool, int]]]:
    """For each message to `rank`, the sends of `rank` that its arrival shows to have been received.

    Each entry is (whether activations, number received so far), counted in the order in which `rank` sends
    them to that neighbour; messages that show nothing new have none.
    """
    rank_of_stage, num_stages = program.rank_of_stage, program.num_stages
    numbers: dict[Message, int] = {}
    counts: dict[tuple[int, bool], int] = {}
    for message in _sent(program, rank):
        kind = (rank_of_stage[message.destination], _is_activation(message))
        counts[kind] = counts.get(kind, 0) + 1
        numbers[message] = counts[kind]
    known: dict[Message, list[tuple[bool, int]]] = {}
    for other in {neighbour for neighbour, _ in counts}:
        arrived = {True: 0, False: 0}
        reported = dict(arrived)
        for action in program.actions[other]:
            incoming = received(action, num_stages)
            if incoming in numbers:
                forward = _is_activation(incoming)
                arrived[forward] = max(arrived[forward], numbers[incoming])
            outgoing = sent(action, num_stages)
            if outgoing is not None and rank_of_stage[outgoing.destination] == rank and reported != arrived:
                known[outgoing] = [
                    (forward, count) for forward, count in arrived.items() if count > reported[forward]
                ]
                reported = dict(arrived)
    return known


def most_messages(program: Program, *, common_step: bool) -> list[int]:
    """For each rank, the most messages that it holds at once: open receives, sends that no message from the
    receiver has acknowledged, and what one of its stages holds for another.

    Args:
        program: With complete forwards and backwards, and without deadlock.
        common_step: Whether all stages update together.
    """
    places = _places_of_all(program, common_step=common_step)
    return [_most_messages(program, rank, places[rank]) for rank in range(program.num_ranks)]


def _most_messages(program: Program, rank: int, places: Mapping[Message, Place]) -> int:
    num_stages, rank_of_stage = program.num_stages, program.rank_of_stage
    acknowledges = acknowledged(program, rank)
    to_post: dict[tuple[int, bool], deque[Message]] = {}
    for (_, receiver), messages in sent_between_ranks(program, by_or_to=rank).items():
        for message in messages if receiver == rank else ():
            channel = rank_of_stage[message.source], _is_activation(message)
            to_post.setdefault(channel, deque()).append(message)
    posted: dict[tuple[int, bool], set[Message]] = {channel: set() for channel in to_post}
    sends: dict[tuple[int, bool], int] = {}
    gone: dict[tuple[int, bool], int] = {}
    now = most = 0

    def post(channel: tuple[int, bool], place: Place, *, until: Message | None = None) -> int:
        """How many receives are opened: those ahead, or all up to a message."""
        waiting, ahead = to_post[channel], posted[channel]
        before = len(ahead)
        while until is not None and until not in ahead:
            ahead.add(waiting.popleft())
        while until is None and waiting and len(ahead) < POSTED_AHEAD and places[waiting[0]] <= place:
            ahead.add(waiting.popleft())
        return len(ahead) - before

    def released(channel: tuple[int, bool], count: int) -> int:
        """How many sends are known to have arrived, beyond those that were."""
        before = gone.get(channel, 0)
        gone[channel] = max(before, count)
        return gone[channel] - before

    for number, action in enumerate(program.actions[rank]):
        here = updated(number)
        for channel in to_post:
            now += post(channel, here)
        most = max(most, now)
        incoming, outgoing = received(action, num_stages), sent(action, num_stages)
        if incoming is not None and is_local(incoming, program):
            now -= 1
        elif incoming is not None:
            channel = (rank_of_stage[incoming.source], _is_activation(incoming))
            now += post(channel, here, until=incoming)
            most = max(most, now)
            posted[channel].remove(incoming)
            now -= 1
            for is_activation, count in acknowledges.get(incoming, ()):
                now -= released((channel[0], is_activation), count)
            now += post(channel, here)
            most = max(most, now)
        if outgoing is not None:
            now += 1
            most = max(most, now)
            if not is_local(outgoing, program):
                channel = (rank_of_stage[outgoing.destination], _is_activation(outgoing))
                sends[channel] = sends.get(channel, 0) + 1
                now -= released(channel, sends[channel] - UNACKNOWLEDGED)
    return most


def _places_of_all(program: Program, *, common_step: bool) -> list[dict[Message, Place]]:
    """`places_to_post` of every rank, in one pass: what work depends on is a place for each rank."""
    import numpy as np

    ranks, rank_of_stage, num_stages = program.num_ranks, program.rank_of_stage, program.num_stages
    lag = steps_to_agree(program)
    none = np.zeros(ranks, dtype=np.int64)
    finished: dict[int, np.ndarray] = {}
    for rank in range(ranks):
        for version, place in _finished_updates(program, rank).items():
            finished.setdefault(version, none.copy())[rank] = place
    # Arrays are replaced, never written: messages keep those that they were sent with.
    depends = [none] * ranks
    channels: dict[tuple[int, int], deque[np.ndarray]] = {
        (stage, stage + way): deque() for stage in range(num_stages) for way in (-1, 1)
    }
    position = [0] * ranks
    places: list[dict[Message, Place]] = [{} for _ in range(ranks)]
    runnable = deque(range(ranks))
    while runnable:
        current = runnable.popleft()
        actions = program.actions[current]
        place = position[current]
        own = depends[current]
        while place < len(actions):
            action = actions[place]
            message = received(action, num_stages)
            if message is not None and rank_of_stage[message.source] != current:
                channel = channels[message.source, action.stage]
                if not channel:
                    break
                dependency = channel.popleft()
                own = np.maximum(own, dependency)
                places[current][message] = int(dependency[current])
            needed = version_awaited(action, program, common_step=common_step, lag=lag)
            if needed in finished:
                own = np.maximum(own, finished[needed])
            place += 1
            receiver = destination(action, num_stages)
            if receiver is not None and rank_of_stage[receiver] != current:
                given = own.copy()
                given[current] = launched(place)
                channels[action.stage, receiver].append(given)
                runnable.append(rank_of_stage[receiver])
        position[current], depends[current] = place, own
    return places


def _sent(program: Program, rank: int) -> Iterator[Message]:
    for action in program.actions[rank]:
        message = sent(action, program.num_stages)
        if message is not None and not is_local(message, program):
            yield message


def _is_activation(message: Message) -> bool:
    return message.destination > message.source
