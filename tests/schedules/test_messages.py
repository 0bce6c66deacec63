"""What stages send each other."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from support.schedule_cases import programs

from schedules import build, parse_action
from schedules.messages import Message, is_local, received, sent, sent_between_ranks


def test_messages_of_each_op_at_the_edges_and_within():
    def of(text):
        action = parse_action(text)
        return received(action, 3), sent(action, 3)

    assert of("0F5@0") == (None, Message(0, 1, 5))
    assert of("1F5@0") == (Message(0, 1, 5), Message(1, 2, 5))
    assert of("2F5@0") == (Message(1, 2, 5), None)
    assert of("2B5@0") == (None, Message(2, 1, 5))
    assert of("1I5@0") == (Message(2, 1, 5), Message(1, 0, 5))
    assert of("0B5@0") == (Message(1, 0, 5), None)
    assert of("1W5@0") == (None, None)
    assert of("1U5") == (None, None)


@settings(deadline=None, max_examples=60)
@given(programs(max_stages=6, max_microbatches=12))
def test_everything_sent_between_ranks_is_received_once_and_nothing_else(program):
    by_pair = sent_between_ranks(program)
    needed = Counter()
    for rank, actions in enumerate(program.actions):
        for action in actions:
            message = received(action, program.num_stages)
            if message is not None and not is_local(message, program):
                needed[program.rank_of_stage[message.source], rank, message] += 1
    given_by = Counter((*pair, message) for pair, messages in by_pair.items() for message in messages)
    assert given_by == needed
    assert set(given_by.values()) <= {1}
    for rank in range(program.num_ranks):
        of_rank = {pair: messages for pair, messages in by_pair.items() if rank in pair}
        assert sent_between_ranks(program, by_or_to=rank) == of_rank


def test_two_interleaved_ranks_send_activations_and_gradients_the_same_way():
    program = build("interleaved-1f1b", stages=2, microbatches=2, steps=1, chunks=2)
    kinds = {message.destination > message.source for message in sent_between_ranks(program)[0, 1]}
    assert kinds == {True, False}
