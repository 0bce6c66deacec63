"""Finds deadlocks: ranks that wait for each other for ever.

Ranks perform their lists strictly in order. They wait for messages and for each other's updates: where all
stages update together, whoever reads a version needs every rank's part of its gradient norm; where each
updates on its own, a forward needs to know whether all ranks go on after an earlier step. None of this
depends on the ranks' speed, so it is enough to let each rank run as far as it can, again and again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from schedules.actions import Action, Op, Program
from schedules.dependencies import steps_to_agree, version_awaited
from schedules.messages import Channel, channel_ends

UNACKNOWLEDGED = 8
"""Most sends in flight between two ranks, of a kind, that no message from the receiver acknowledges, as in a
fill or an evaluation; more where a program cannot do with these."""


def sends_in_flight(program: Program) -> int:
    """Sends of a kind to one rank that must be able to wait for their receives, so that `program` ends:
    `UNACKNOWLEDGED`, or the least number that is enough, if that is more.

    LoopedBFS sends all micro-batches of one chunk before the receiver takes the first of them, and GPipe
    with shards of the head all parts of a step's gradients.

    Args:
        program: Without deadlock when channels hold any number of messages.
    """
    if find_deadlock(program, channel_capacity=UNACKNOWLEDGED) is None:
        return UNACKNOWLEDGED
    too_few = enough = UNACKNOWLEDGED
    while find_deadlock(program, channel_capacity=enough) is not None:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if find_deadlock(program, channel_capacity=middle) is None:
            enough = middle
        else:
            too_few = middle
    return enough


def find_deadlock(program: Program, *, channel_capacity: int | None = None) -> str | None:
    """The chain of waits when no rank can go on; None if all ranks reach the end.

    Args:
        program: With complete forwards and backwards, and messages in order on each channel.
        channel_capacity: Messages of a kind between two ranks before their sender must wait; None: any
            number.
    """
    rank_of_stage, (channels, ends) = program.rank_of_stage, _by_number(program)
    position = [0] * program.num_ranks
    # Messages of a channel come in one order at both ends, so counting the unread ones says which are there.
    sources = [rank_of_stage[channel.source] for channel in channels]
    destinations = [rank_of_stage[channel.destination] for channel in channels]
    links = [*zip(sources, destinations, (channel.kind for channel in channels), strict=True)]
    unread, in_flight = [0] * len(channels), dict.fromkeys(links, 0)
    unsent: list[list[int]] = [[] for _ in range(program.num_ranks)]
    runnable = deque(range(program.num_ranks))
    queued = [True] * program.num_ranks
    written = [program.initial_versions[-1]] * program.num_stages
    complete = written[0]  # the newest version that all stages have the gradient of
    awaiting_update: set[int] = set()
    lag = steps_to_agree(program)
    update, common_step = Op.UPDATE, program.updates_together

    def wake(rank: int) -> None:
        if not queued[rank]:
            queued[rank] = True
            runnable.append(rank)

    while runnable:
        rank = runnable.popleft()
        queued[rank] = False
        actions = program.actions[rank]
        place = position[rank]
        while True:
            waiting = unsent[rank]
            while waiting:
                channel = waiting[0]
                link, receiver = links[channel], destinations[channel]
                if channel_capacity is not None and receiver != rank and in_flight[link] >= channel_capacity:
                    break
                unread[channel] += 1
                in_flight[link] += 1
                del waiting[0]
                wake(receiver)
            if waiting or place == len(actions):
                break
            action = actions[place]
            stage, op, _, version = action
            may_wait = version > complete or not common_step  # else none later than its own is awaited
            if may_wait and version_awaited(action, program, common_step=common_step, lag=lag) > complete:
                awaiting_update.add(rank)
                break
            receives, sends = ends[stage, op]
            if not all(map(unread.__getitem__, receives)):
                break
            for channel in receives:
                unread[channel] -= 1
                in_flight[links[channel]] -= 1
                if channel_capacity is not None:
                    wake(sources[channel])
            if op is update:
                written[stage] = version
                if min(written) > complete:
                    complete = min(written)
                    for blocked in awaiting_update:
                        wake(blocked)
                    awaiting_update.clear()
            place += 1
            unsent[rank] = sends.copy()
        position[rank] = place

    stuck = [
        rank for rank, actions in enumerate(program.actions) if position[rank] < len(actions) or unsent[rank]
    ]
    if not stuck:
        return None
    not_sent = [[channels[channel] for channel in waiting] for waiting in unsent]
    not_read = dict(zip(channels, unread, strict=True))
    return _explain(program, position, not_sent, not_read, written, stuck[0])


def _by_number(program: Program) -> tuple[list[Channel], dict[tuple[int, Op], list[list[int]]]]:
    """The channels, and by their numbers those that every op of a stage receives from and sends to."""
    ends = channel_ends(program)
    channels = list(dict.fromkeys(channel for receives, _ in ends.values() for channel in receives))
    number_of = {channel: number for number, channel in enumerate(channels)}
    return channels, {key: [[number_of[each] for each in of] for of in both] for key, both in ends.items()}


def _explain(
    program: Program,
    position: list[int],
    unsent: list[list[Channel]],
    unread: Mapping[Channel, int],
    written: list[int],
    rank: int,
) -> str:
    """The chain of waits that starts at `rank`, up to the first rank that occurs again."""
    links = []
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        if unsent[rank]:
            other = program.rank_of_stage[unsent[rank][0].destination]
            links.append(
                f"rank {rank} cannot send {_unsent(program, position, unsent, rank)} to rank {other} while "
                f"the channel is full, which rank {other} relieves only after "
                f"{_next(program, position, other)}"
            )
        else:
            action = program.actions[rank][position[rank]]
            needed, other = _awaited(action, program, unread, written)
            reason = (
                f"sending {_unsent(program, position, unsent, other)}"
                if unsent[other]
                else _next(program, position, other)
            )
            links.append(
                f"rank {rank} waits at {action} for {needed}, which rank {other} gives only after {reason}"
            )
        rank = other
    return "deadlock: " + "; ".join(links)


def _awaited(
    action: Action, program: Program, unread: Mapping[Channel, int], written: list[int]
) -> tuple[str, int]:
    """What `action` waits for, and the rank that gives it."""
    lag = steps_to_agree(program)
    version = version_awaited(action, program, common_step=program.updates_together, lag=lag)
    for stage, newest in enumerate(written):
        if newest < version:
            return f"stage {stage}'s update {version}", program.rank_of_stage[stage]
    for channel in channel_ends(program)[action.stage, action.op].receives:
        if not unread[channel]:
            return _named(channel, action.microbatch), program.rank_of_stage[channel.source]
    raise AssertionError("an action that needs no message and no update can always be performed")


def _next(program: Program, position: list[int], rank: int) -> Action:
    return program.actions[rank][position[rank]]


def _unsent(program: Program, position: list[int], unsent: list[list[Channel]], rank: int) -> str:
    return _named(unsent[rank][0], program.actions[rank][position[rank] - 1].microbatch)


def _named(channel: Channel, microbatch: int) -> str:
    return f"stage {channel.source}'s {channel.kind} of micro-batch {microbatch}"
