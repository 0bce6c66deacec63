"""Does some rank wait for ever?

Ranks perform their lists strictly in order and talk through channels only, so what can be performed does not
depend on how fast any of them is: it is enough to let each rank run as far as it can, again and again.
"""

from __future__ import annotations

from collections import deque

from schedules.actions import Action, Program
from schedules.messages import Message, destination, received, sent, source


def find_deadlock(program: Program, *, channel_capacity: int | None = None) -> str | None:
    """Who waits for whom when no rank can go on; None if all of them get to the end.

    Args:
        program: Its forwards and backwards are complete, and each channel's messages are received in the
            order in which they are sent.
        channel_capacity: Messages that a channel holds before its sender must wait; None: any number.
    """
    num_stages, rank_of_stage = program.num_stages, program.rank_of_stage
    position = [0] * program.num_ranks
    # Messages of a channel come in one order at both ends, so counting the unread ones says which are there.
    unread = {(stage, stage + way): 0 for stage in range(num_stages) for way in (-1, 1)}
    unsent: list[tuple[int, int] | None] = [None] * program.num_ranks
    runnable = deque(range(program.num_ranks))
    queued = [True] * program.num_ranks

    def wake(stage: int) -> None:
        rank = rank_of_stage[stage]
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
            sender = source(action, num_stages)
            if sender is not None:
                if not unread[sender, action[0]]:
                    break
                unread[sender, action[0]] -= 1
                if channel_capacity is not None:
                    wake(sender)
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
    return _explain(program, position, unsent, stuck[0]) if stuck else None


def _explain(program: Program, position: list[int], unsent: list[tuple[int, int] | None], rank: int) -> str:
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
            needed = received(program.actions[rank][position[rank]], program.num_stages)
            assert needed is not None, "an action that needs no message can always be performed"
            other = program.rank_of_stage[needed.source]
            reason = (
                _next(program, position, other)
                if unsent[other] is None
                else f"sending {_last_sent(program, position, other)}"
            )
            links.append(
                f"rank {rank} waits at {_next(program, position, rank)} for {_named(needed)}, "
                f"which rank {other} gives only after {reason}"
            )
        rank = other
    return "deadlock: " + "; ".join(links)


def _next(program: Program, position: list[int], rank: int) -> Action:
    return program.actions[rank][position[rank]]


def _last_sent(program: Program, position: list[int], rank: int) -> str:
    message = sent(program.actions[rank][position[rank] - 1], program.num_stages)
    assert message is not None, "only an action with a message is held up by a channel"
    return _named(message)


def _named(message: Message) -> str:
    what = "activations" if message.destination > message.source else "gradient"
    return f"stage {message.source}'s {what} of micro-batch {message.microbatch}"
