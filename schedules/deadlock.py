"""Finds deadlocks: ranks that wait for each other for ever.

Ranks perform their lists strictly in order. They wait for messages and for each other's updates: where all
stages update together, whoever reads a version needs every rank's part of its gradient norm; where each
updates on its own, a forward needs to know whether all ranks go on after an earlier step. None of this
depends on the ranks' speed, so it is enough to let each rank run as far as it can, again and again.
"""

from __future__ import annotations

from collections import deque

from schedules.actions import Action, Op, Program
from schedules.dependencies import steps_to_agree, version_awaited
from schedules.messages import Message, destination, received, sent, source


def find_deadlock(program: Program, *, channel_capacity: int | None = None) -> str | None:
    """The chain of waits when no rank can go on; None if all ranks reach the end.

    Args:
        program: With complete forwards and backwards, and messages in order on each channel.
        channel_capacity: Messages that a channel holds before its sender must wait; None: any number.
    """
    num_stages, rank_of_stage = program.num_stages, program.rank_of_stage
    position = [0] * program.num_ranks
    # Messages of a channel come in one order at both ends, so counting the unread ones says which are there.
    unread = {(stage, stage + way): 0 for stage in range(num_stages) for way in (-1, 1)}
    unsent: list[tuple[int, int] | None] = [None] * program.num_ranks
    runnable = deque(range(program.num_ranks))
    queued = [True] * program.num_ranks
    update = Op.UPDATE
    written = [program.initial_versions[-1]] * num_stages
    complete = written[0]  # the newest version that all stages have the gradient of
    awaiting_update: set[int] = set()
    lag = steps_to_agree(program)

    def wake(stage: int) -> None:
        wake_rank(rank_of_stage[stage])

    def wake_rank(rank: int) -> None:
        if not queued[rank]:
            queued[rank] = True
            runnable.append(rank)

    while runnable:
        rank = runnable.popleft()
        queued[rank] = False
        actions = program.actions[rank]
        place = position[rank]
        while True:
            channel = unsent[rank]
            if channel is not None:
                local = rank_of_stage[channel[1]] == rank
                if not local and channel_capacity is not None and unread[channel] >= channel_capacity:
                    break
                unread[channel] += 1
                unsent[rank] = None
                wake(channel[1])
            if place == len(actions):
                break
            action = actions[place]
            if version_awaited(action, program, common_step=program.updates_together, lag=lag) > complete:
                awaiting_update.add(rank)
                break
            sender = source(action, num_stages)
            if sender is not None:
                if not unread[sender, action[0]]:
                    break
                unread[sender, action[0]] -= 1
                if channel_capacity is not None:
                    wake(sender)
            elif action.op is update:
                written[action.stage] = action.version
                if min(written) > complete:
                    complete = min(written)
                    for waiting in awaiting_update:
                        wake_rank(waiting)
                    awaiting_update.clear()
            place += 1
            receiver = destination(action, num_stages)
            if receiver is not None:
                unsent[rank] = (action[0], receiver)
        position[rank] = place

    stuck = [
        rank
        for rank, actions in enumerate(program.actions)
        if position[rank] < len(actions) or unsent[rank] is not None
    ]
    return _explain(program, position, unsent, written, stuck[0]) if stuck else None


def _explain(
    program: Program,
    position: list[int],
    unsent: list[tuple[int, int] | None],
    written: list[int],
    rank: int,
) -> str:
    """The chain of waits that starts at `rank`, up to the first rank that occurs again."""
    links = []
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        full = unsent[rank]
        if full is not None:
            other = program.rank_of_stage[full[1]]
            links.append(
                f"rank {rank} cannot send {_last_sent(program, position, rank)} to rank {other} while the "
                f"channel is full, which rank {other} relieves only after {_next(program, position, other)}"
            )
        else:
            action = program.actions[rank][position[rank]]
            needed, other = _awaited(action, program, written)
            reason = (
                _next(program, position, other)
                if unsent[other] is None
                else f"sending {_last_sent(program, position, other)}"
            )
            links.append(
                f"rank {rank} waits at {action} for {needed}, which rank {other} gives only after {reason}"
            )
        rank = other
    return "deadlock: " + "; ".join(links)


def _awaited(action: Action, program: Program, written: list[int]) -> tuple[str, int]:
    """What `action` waits for, and the rank that gives it."""
    lag = steps_to_agree(program)
    version = version_awaited(action, program, common_step=program.updates_together, lag=lag)
    for stage, newest in enumerate(written):
        if newest < version:
            return f"stage {stage}'s update {version}", program.rank_of_stage[stage]
    message = received(action, program.num_stages)
    assert message is not None, "an action that needs no message and no update can always be performed"
    return _named(message), program.rank_of_stage[message.source]


def _next(program: Program, position: list[int], rank: int) -> Action:
    return program.actions[rank][position[rank]]


def _last_sent(program: Program, position: list[int], rank: int) -> str:
    message = sent(program.actions[rank][position[rank] - 1], program.num_stages)
    assert message is not None, "only an action with a message is held up by a channel"
    return _named(message)


def _named(message: Message) -> str:
    what = "activations" if message.destination > message.source else "gradient"
    return f"stage {message.source}'s {what} of micro-batch {message.microbatch}"
