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
from collections.abc import Iterator

from schedules.actions import Action, Op, Program
from schedules.messages import Message, destination, is_local, received, sent, source

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


def most_unacknowledged(program: Program, rank: int) -> int:
    """The most sends of `rank` at once that no message to it has acknowledged, `UNACKNOWLEDGED` per channel
    at most."""
    acknowledges = acknowledged(program, rank)
    sends: dict[tuple[int, bool], int] = {}
    gone: dict[tuple[int, bool], int] = {}
    most = 0
    for action in program.actions[rank]:
        incoming = received(action, program.num_stages)
        if incoming is not None:
            for is_activation, count in acknowledges.get(incoming, ()):
                kind = program.rank_of_stage[incoming.source], is_activation
                gone[kind] = max(gone.get(kind, 0), count)
        outgoing = sent(action, program.num_stages)
        if outgoing is not None and not is_local(outgoing, program):
            kind = program.rank_of_stage[outgoing.destination], _is_activation(outgoing)
            sends[kind] = sends.get(kind, 0) + 1
            most = max(most, sum(sends.values()) - sum(gone.values()))
            gone[kind] = max(gone.get(kind, 0), sends[kind] - UNACKNOWLEDGED)
    return most


def _sent(program: Program, rank: int) -> Iterator[Message]:
    for action in program.actions[rank]:
        message = sent(action, program.num_stages)
        if message is not None and not is_local(message, program):
            yield message


def _is_activation(message: Message) -> bool:
    return message.destination > message.source
