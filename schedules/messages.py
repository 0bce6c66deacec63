"""Messages between stages. Programs do not list them: they follow from F, B and I, and only here.

A forward needs the activations of the stage before it and gives its own to the stage after it; a backward (or
the input half of a split one) needs the gradient of the stage after it and gives its own to the stage before
it. The weight half needs no message.

A channel is a directed pair of neighbouring stages: `(s, s + 1)` carries activations, `(s + 1, s)` gradients.
The verifier checks that the messages of a channel are received in the order in which they are sent.
"""

from __future__ import annotations

from typing import NamedTuple

from schedules.actions import Action, Op, Program


class Message(NamedTuple):
    """One micro-batch's activations (to the stage after `source`) or gradient (to the one before)."""

    source: int
    """Stage that sends."""
    destination: int
    """Stage that receives."""
    microbatch: int


MessagesByPair = dict[tuple[int, int], list[Message]]
"""By sending and receiving rank."""


def source(action: Action, num_stages: int) -> int | None:
    """The stage whose message `action` needs before it can start; None if it needs none."""
    stage, op, _, _ = action
    if op is Op.FORWARD:
        return stage - 1 if stage > 0 else None
    if op is Op.BACKWARD or op is Op.BACKWARD_INPUT:
        return stage + 1 if stage < num_stages - 1 else None
    return None


def destination(action: Action, num_stages: int) -> int | None:
    """The stage that `action` sends a message to when it is done; None if it sends none."""
    stage, op, _, _ = action
    if op is Op.FORWARD:
        return stage + 1 if stage < num_stages - 1 else None
    if op is Op.BACKWARD or op is Op.BACKWARD_INPUT:
        return stage - 1 if stage > 0 else None
    return None


def received(action: Action, num_stages: int) -> Message | None:
    """The message that `action` needs before it can start; None if it needs none."""
    sender = source(action, num_stages)
    return None if sender is None else Message(sender, action.stage, action.microbatch)


def sent(action: Action, num_stages: int) -> Message | None:
    """The message that `action` sends when it is done; None if it sends none."""
    receiver = destination(action, num_stages)
    return None if receiver is None else Message(action.stage, receiver, action.microbatch)


def is_local(message: Message, program: Program) -> bool:
    """Whether both ends of `message` are stages of one rank, so that nothing is transferred."""
    return program.rank_of_stage[message.source] == program.rank_of_stage[message.destination]


def sent_between_ranks(program: Program, *, by_or_to: int | None = None) -> MessagesByPair:
    """For each pair (sending rank, receiving rank), the messages in the order in which they are sent.

    A receiver can post its receives in this order, whichever it consumes first.

    Args:
        program: Its messages are listed.
        by_or_to: Only messages of this rank, which takes a look at its neighbours' actions alone; None: all.
    """
    sent_by_pair: MessagesByPair = {}
    for rank in range(program.num_ranks) if by_or_to is None else sorted(_with_neighbours(program, by_or_to)):
        for action in program.actions[rank]:
            message = sent(action, program.num_stages)
            if message is not None and not is_local(message, program):
                pair = (rank, program.rank_of_stage[message.destination])
                if by_or_to is None or by_or_to in pair:
                    sent_by_pair.setdefault(pair, []).append(message)
    return sent_by_pair


def _with_neighbours(program: Program, rank: int) -> set[int]:
    """A rank and its neighbours: those that hold a stage next to one of its own."""
    pairs = zip(program.rank_of_stage, program.rank_of_stage[1:], strict=False)
    return {rank}.union(*(pair for pair in pairs if rank in pair))
