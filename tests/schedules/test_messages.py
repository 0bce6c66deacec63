"""What stages send each other."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from support.schedule_cases import programs

from schedules import build, parse_action
from schedules.messages import Kind, Message, is_local, received, sent, sent_between_ranks


def test_messages_of_each_op_at_the_edges_and_within():
    def of(text, *, shard_head=False):
        action = parse_action(text)
        program = build("1f1b", stages=3, microbatches=6, steps=1, shard_head=shard_head)
        return received(action, program), sent(action, program)

    def activations(*stages):
        return (Message(*stages, Kind.ACTIVATIONS, 5),)

    def gradient(*stages):
        return (Message(*stages, Kind.GRADIENT, 5),)

    assert of("0F5@0") == ((), activations(0, 1))
    assert of("1F5@0") == (activations(0, 1), activations(1, 2))
    assert of("2F5@0") == (activations(1, 2), ())
    assert of("2B5@0") == ((), gradient(2, 1))
    assert of("1I5@0") == (gradient(2, 1), gradient(1, 0))
    assert of("0B5@0") == (gradient(1, 0), ())
    assert of("1W5@0") == ((), ())
    assert of("1U5") == ((), ())

    hidden, sums = ([Message(2, shard, kind, 5) for shard in (3, 4, 5)] for kind in (Kind.HIDDEN, Kind.SUMS))
    parts = [Message(shard, 2, Kind.PART, 5) for shard in (3, 4, 5)]
    assert of("1F5@0", shard_head=True) == of("1F5@0")
    assert of("2F5@0", shard_head=True) == (activations(1, 2), tuple(hidden))
    assert of("4S5@0", shard_head=True) == ((hidden[1],), (parts[1],))
    assert of("2B5@0", shard_head=True) == (tuple(parts), (*gradient(2, 1), *sums))
    assert of("4T5@0", shard_head=True) == ((sums[1],), ())


@settings(deadline=None, max_examples=60)
@given(programs(max_stages=6, max_microbatches=12))
def test_everything_sent_between_ranks_is_received_once_and_nothing_else(program):
    by_pair = sent_between_ranks(program)
    needed = Counter()
    for rank, actions in enumerate(program.actions):
        for action in actions:
            for message in received(action, program):
                if not is_local(message, program):
                    needed[program.rank_of_stage[message.source], rank, message] += 1
    given_by = Counter((*pair, message) for pair, messages in by_pair.items() for message in messages)
    assert given_by == needed
    assert set(given_by.values()) <= {1}
    for rank in range(program.num_ranks):
        of_rank = {pair: messages for pair, messages in by_pair.items() if rank in pair}
        assert sent_between_ranks(program, by_or_to=rank) == of_rank


def test_two_interleaved_ranks_send_activations_and_gradients_the_same_way():
    program = build("interleaved-1f1b", stages=2, microbatches=2, steps=1, chunks=2)
    kinds = {message.kind for message in sent_between_ranks(program)[0, 1]}
    assert kinds == {Kind.ACTIVATIONS, Kind.GRADIENT}
