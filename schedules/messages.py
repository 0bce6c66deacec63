"""Messages between stages. Programs do not list them: they follow from F, B, I, S, T, E and G, and only here.

A forward needs the activations of the stage before it and gives its own to the stage after it; a backward (or
the input half of a split one) needs the gradient of the stage after it and gives its own to the stage before
it. The weight half needs no message.

Where the head is in shards, the last stage before them gives its hidden states to every shard, and its
backward needs a part of their gradient and of the softmax's sums from every shard. It gives the sums over the
whole vocabulary back: the gradient of a shard's weights needs them. Where these are shards of the embedding,
too, stage 0 needs the embedded tokens of every shard, which add up, and its backward gives every shard the
gradient of the sum.

A channel is a directed pair of stages and a kind of message. The verifier checks that the messages of a
channel are received in the order in which they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from schedules.actions import Action, Op, Program


class Kind(StrEnum):
    """What a message carries."""

    ACTIVATIONS = "activations"
    GRADIENT = "gradient"
    HIDDEN = "hidden states"
    """Input of the head, to one of its shards."""
    PART = "part of the head's gradient"
    """A shard's part of the gradient of the head's input, and of the softmax's sums."""
    SUMS = "softmax sums"
    """Over the whole vocabulary: to a shard."""
    EMBEDDED = "embedded tokens"
    """Those in a shard's rows, and zeros for the others: to stage 0."""
    OF_EMBEDDED = "gradient of the embedded tokens"
    """To a shard."""


IN_ONE = (Kind.HIDDEN, Kind.PART, Kind.OF_EMBEDDED)
"""Kinds of messages between one rank and all others that follow each other on one queue of a GPU: those of a
micro-batch belong together. Of other kinds each pair has its own: with those a rank that synchronizes its
device could wait for a message that waits for its turn (`tests/stages/comm/test_nccl_streams.py`)."""
MOST_QUEUES = 32
"""Hardware queues that CUDA uses at most, and streams of one priority that torch has."""
OWN_QUEUES = 2
"""Queues of a GPU for the actions and for the updates of its rank."""


class Channel(NamedTuple):
    """One kind of message from one stage to another."""

    source: int
    """Stage that sends."""
    destination: int
    """Stage that receives."""
    kind: Kind


class Message(NamedTuple):
    """What a channel carries for one micro-batch."""

    source: int
    destination: int
    kind: Kind
    microbatch: int


class Ends(NamedTuple):
    """The channels of the actions of one op at one stage."""

    receives: tuple[Channel, ...]
    """Each must have a message before an action can start."""
    sends: tuple[Channel, ...]
    """Each gets a message when an action is done."""


MessagesByPair = dict[tuple[int, int], list[Message]]
"""By sending and receiving rank."""


def channel_ends(program: Program) -> Mapping[tuple[int, Op], Ends]:
    """The channels of every stage and op of `program` but updates."""
    return _channel_ends(program.num_stages, program.head_shards, program.tied_shards)


@lru_cache(maxsize=64)
def _channel_ends(num_stages: int, head_shards: int, tied_shards: bool) -> Mapping[tuple[int, Op], Ends]:
    last = num_stages - head_shards - 1
    ends: dict[tuple[int, Op], Ends] = {}
    hidden, parts, sums = (
        tuple(
            Channel(shard, last, kind) if kind is Kind.PART else Channel(last, shard, kind)
            for shard in range(last + 1, num_stages)
        )
        for kind in (Kind.HIDDEN, Kind.PART, Kind.SUMS)
    )
    embedded, of_embedded = (
        tuple(
            Channel(shard, 0, kind) if kind is Kind.EMBEDDED else Channel(0, shard, kind)
            for shard in range(last + 1, num_stages)
            if tied_shards
        )
        for kind in (Kind.EMBEDDED, Kind.OF_EMBEDDED)
    )
    for stage in range(last + 1):
        before = (Channel(stage - 1, stage, Kind.ACTIVATIONS),) if stage > 0 else embedded
        after = (Channel(stage, stage + 1, Kind.ACTIVATIONS),) if stage < last else hidden
        from_after = (Channel(stage + 1, stage, Kind.GRADIENT),) if stage < last else parts
        to_before = (Channel(stage, stage - 1, Kind.GRADIENT),) if stage > 0 else of_embedded
        to_shards = sums if stage == last else ()
        ends[stage, Op.FORWARD] = Ends(before, after)
        ends[stage, Op.BACKWARD] = ends[stage, Op.BACKWARD_INPUT] = Ends(from_after, to_before + to_shards)
        ends[stage, Op.BACKWARD_WEIGHT] = Ends((), ())
        ends[stage, Op.LOSS] = Ends(parts if stage == last else (), ())
    for shard, given, part, whole in zip(range(last + 1, num_stages), hidden, parts, sums, strict=True):
        ends[shard, Op.HEAD] = Ends((given,), (part,))
        ends[shard, Op.HEAD_WEIGHT] = Ends((whole,), ())
    for given, back in zip(embedded, of_embedded, strict=True):
        ends[given.source, Op.EMBED] = Ends((), (given,))
        ends[given.source, Op.EMBED_WEIGHT] = Ends((back,), ())
    for stage in range(num_stages):
        ends[stage, Op.UPDATE] = Ends((), ())
    return ends


def received(action: Action, program: Program) -> tuple[Message, ...]:
    """The messages that `action` needs before it can start."""
    channels = channel_ends(program)[action.stage, action.op].receives
    return tuple(Message(*channel, action.microbatch) for channel in channels)


def sent(action: Action, program: Program) -> tuple[Message, ...]:
    """The messages that `action` sends when it is done."""
    channels = channel_ends(program)[action.stage, action.op].sends
    return tuple(Message(*channel, action.microbatch) for channel in channels)


def is_local(message: Message | Channel, program: Program) -> bool:
    """Whether both ends of `message` are stages of one rank, so that nothing is transferred."""
    return program.rank_of_stage[message.source] == program.rank_of_stage[message.destination]


def channels_between_ranks(
    rank_of_stage: Sequence[int], *, head_shards: int = 0, tied_shards: bool = False
) -> set[tuple[int, int, Kind]]:
    """Sending rank, receiving rank and kind of all messages between ranks; arguments as in `Program`."""
    ends = _channel_ends(len(rank_of_stage), head_shards, tied_shards).values()
    of_ranks = (
        (rank_of_stage[source], rank_of_stage[destination], kind)
        for source, destination, kind in chain.from_iterable(sends for _, sends in ends)
    )
    return {(sender, receiver, kind) for sender, receiver, kind in of_ranks if sender != receiver}


class RankLinks(NamedTuple):
    """What carries the messages of a rank."""

    communicators: int
    """One for each of `IN_ONE`, and one for each other channel to or from another rank."""
    channels: int
    """Directed pairs with another rank, by kind of message."""


@lru_cache(maxsize=64)
def links_of_ranks(
    rank_of_stage: tuple[int, ...], *, head_shards: int, tied_shards: bool
) -> tuple[RankLinks, ...]:
    """The links of each rank; arguments as in `Program`."""
    ends = [
        (rank, kind, sender, receiver)
        for sender, receiver, kind in channels_between_ranks(
            rank_of_stage, head_shards=head_shards, tied_shards=tied_shards
        )
        for rank in (sender, receiver)
    ]
    communicators = Counter(rank for rank, *_ in {end[:2] if end[1] in IN_ONE else end for end in ends})
    channels = Counter(rank for rank, *_ in ends)
    return tuple(RankLinks(communicators[rank], channels[rank]) for rank in range(max(rank_of_stage) + 1))


def sent_between_ranks(program: Program, *, by_or_to: int | None = None) -> MessagesByPair:
    """For each pair (sending rank, receiving rank), the messages in the order in which they are sent.

    A receiver can post its receives in this order, whichever it consumes first.

    Args:
        program: Its messages are listed.
        by_or_to: Only messages of this rank, which takes a look at its neighbours' actions alone; None: all.
    """
    crossing = {
        key: [channel for channel in ends.sends if not is_local(channel, program)]
        for key, ends in channel_ends(program).items()
    }
    rank_of_stage = program.rank_of_stage
    sent_by_pair: MessagesByPair = {}
    for rank in range(program.num_ranks) if by_or_to is None else sorted(_with_neighbours(program, by_or_to)):
        for action in program.actions[rank]:
            for channel in crossing[action.stage, action.op]:
                pair = (rank, rank_of_stage[channel.destination])
                if by_or_to is None or by_or_to in pair:
                    sent_by_pair.setdefault(pair, []).append(Message(*channel, action.microbatch))
    return sent_by_pair


def _with_neighbours(program: Program, rank: int) -> set[int]:
    """A rank and those that it has messages from or for."""
    pairs = (
        (sender, receiver)
        for sender, receiver, _ in channels_between_ranks(
            program.rank_of_stage, head_shards=program.head_shards, tied_shards=program.tied_shards
        )
    )
    return {rank}.union(*(pair for pair in pairs if rank in pair))
