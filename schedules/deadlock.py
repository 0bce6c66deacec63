"""Does some rank wait for ever?

Ranks perform their lists strictly in order and talk through channels only, so what can be performed does not
depend on how fast any of them is: it is enough to let each rank run as far as it can, again and again.
"""

from __future__ import annotations

from collections import deque

from schedules.actions import Program
from schedules.messages import Message, received, sent


def find_deadlock(program: Program, *, channel_capacity: int | None = None) -> str | None:
    """Who waits for whom when no rank can go on; None if all of them get to the end.

    Args:
        program: Its forwards and backwards are complete, and each channel's messages are received in the
            order in which they are sent.
        channel_capacity: Messages that a channel holds before its sender must wait; None: any number.
    """
    num_stages = program.num_stages
    position = [0] * program.num_ranks
    on_its_way: set[Message] = set()
    in_channel: dict[tuple[int, int], int] = {}
    unsent: list[Message | None] = [None] * program.num_ranks
    runnable = deque(range(program.num_ranks))
    queued = [True] * program.num_ranks

    def wake(stage: int) -> None:
        rank = program.rank_of_stage[stage]
        if not queued[rank]:
            queued[rank] = True
            runnable.append(rank)

    while runnable:
        rank = runnable.popleft()
        queued[rank] = False
        actions = program.actions[rank]
        while True:
            message = unsent[rank]
            if message is not None:
                channel = message[:2]
                local = program.rank_of_stage[message.destination] == rank
                if (
                    not local
                    and channel_capacity is not None
                    and in_channel.get(channel, 0) >= channel_capacity
                ):
                    break
                in_channel[channel] = in_channel.get(channel, 0) + 1
                on_its_way.add(message)
                unsent[rank] = None
                wake(message.destination)
            if position[rank] == len(actions):
                break
            action = actions[position[rank]]
            needed = received(action, num_stages)
            if needed is not None:
                if needed not in on_its_way:
                    break
                on_its_way.remove(needed)
                in_channel[needed[:2]] -= 1
                if channel_capacity is not None:
                    wake(needed.source)
            position[rank] += 1
            unsent[rank] = sent(action, num_stages)

    stuck = [
        rank
        for rank, actions in enumerate(program.actions)
        if position[rank] < len(actions) or unsent[rank] is not None
    ]
    return _explain(program, position, unsent, stuck[0]) if stuck else None


def _explain(program: Program, position: list[int], unsent: list[Message | None], rank: int) -> str:
    """The chain of waits that starts at `rank`, up to the first rank that occurs again."""
    links = []
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        waiting_for = unsent[rank]
        if waiting_for is not None:
            other = program.rank_of_stage[waiting_for.destination]
            links.append(
                f"rank {rank} cannot send {_named(waiting_for)} to rank {other} while the channel is full, "
                f"which rank {other} relieves only after {program.actions[other][position[other]]}"
            )
        else:
            action = program.actions[rank][position[rank]]
            needed = received(action, program.num_stages)
            assert needed is not None, "an action that needs no message can always be performed"
            other = program.rank_of_stage[needed.source]
            held_up_by = unsent[other]
            reason = (
                f"only after sending {_named(held_up_by)}"
                if held_up_by is not None
                else f"only after {program.actions[other][position[other]]}"
            )
            links.append(
                f"rank {rank} waits at {action} for {_named(needed)}, which rank {other} gives {reason}"
            )
        rank = other
    return "deadlock: " + "; ".join(links)


def _named(message: Message) -> str:
    what = "activations" if message.destination > message.source else "gradient"
    return f"stage {message.source}'s {what} of micro-batch {message.microbatch}"
