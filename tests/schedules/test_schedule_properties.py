"""What holds for every program of the family, by other means than our verifier."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.schedule_cases import arguments, programs, run

from schedules import Op, build, verify
from schedules.deadlock import UNACKNOWLEDGED, find_deadlock, sends_in_flight
from schedules.head_shards import EMBEDDED_AHEAD

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(programs())
@pytest.mark.slow
def test_the_verifier_finds_nothing_wrong(program):
    verify(program)


@QUICK
@given(programs(), st.integers(0, 2**32))
@pytest.mark.slow
def test_no_interleaving_of_the_ranks_ends_in_a_deadlock_with_one_message_on_the_way(program, seed):
    # Interleaved rounds of more micro-batches than ranks are the one exception: see the test after this one.
    per_round = program.microbatches // max(1, program.microbatches // program.num_ranks)
    longer_by = max(0, per_round - program.num_ranks) if program.num_stages > program.num_ranks else 0
    # The head is computed while the last stage is one forward further.
    # Look-ups of a tied head are ahead of the first stage.
    room = longer_by + 1 + (program.head_shards > 0) + EMBEDDED_AHEAD * program.tied_shards
    if program.schedule == "interleaved-1f1b":
        # The more ranks of several stages, the more of the shards' messages lie between two of a stage's.
        room += program.head_shards // 3
    # LoopedBFS sends all micro-batches of one chunk before any of the next; shards of the head send their
    # part of every gradient before GPipe's first backward.
    if program.schedule == "looped-bfs" or (program.schedule == "gpipe" and program.head_shards):
        room = program.microbatches
    ran = run(program, capacity=room, chance=random.Random(seed))
    assert ran.finished
    assert ran.unread == 0


@QUICK
@given(programs(max_stages=6, max_microbatches=24, max_steps=2), st.integers(1, 30), st.integers(0, 2**32))
@pytest.mark.slow
def test_the_search_for_deadlocks_agrees_with_the_simple_executor_at_every_room(program, room, seed):
    ran = run(program, capacity=room, chance=random.Random(seed))
    assert ran.finished == (find_deadlock(program, channel_capacity=room) is None)


@pytest.mark.parametrize(
    ("name", "options", "needed"),
    [("2bw", {}, 8), ("looped-bfs", {"chunks": 2}, 20), ("gpipe", {"shard_head": True}, 37)],
)
def test_a_program_gets_as_many_sends_in_flight_as_it_needs(name, options, needed):
    program = build(name, stages=2, microbatches=40, steps=2, **options)
    assert sends_in_flight(program) == needed
    assert run(program, capacity=needed, chance=random.Random(0)).finished
    if needed > UNACKNOWLEDGED:
        assert not run(program, capacity=needed - 1, chance=random.Random(0)).finished


def test_interleaved_rounds_longer_than_the_ranks_need_room_for_the_difference():
    program = build("interleaved-1f1b", stages=5, microbatches=14, steps=1, chunks=2)
    assert not run(program, capacity=2, chance=random.Random(0)).finished
    assert run(program, capacity=3, chance=random.Random(0)).finished
    verify(program, channel_capacity=3)
    with pytest.raises(ValueError, match="deadlock"):
        verify(program, channel_capacity=2)


@QUICK
@given(programs())
@pytest.mark.slow
def test_stashed_backwards_read_the_version_of_their_forward_and_others_the_newest(program):
    stashed = program.schedule not in ("paci", "paci-v", "pipedream-unstashed")
    for stage in range(program.num_stages):
        newest = program.initial_versions[-1]
        forwarded_at, embedded_at = {}, {}
        for action in program.stage_actions(stage):
            if action.op is Op.UPDATE:
                newest = action.version
            elif action.op is Op.EMBED:
                embedded_at[action.microbatch] = action.version
            elif action.op is Op.EMBED_WEIGHT:
                assert action.version == embedded_at[action.microbatch]
            elif action.op is Op.FORWARD or action.op is Op.HEAD:
                forwarded_at[action.microbatch] = action.version
            else:
                assert action.version == (forwarded_at[action.microbatch] if stashed else newest)


@QUICK
@given(arguments(max_microbatches=16), st.data())
@pytest.mark.slow
def test_a_run_in_segments_hands_over_the_versions(asked, data):
    assume(asked["steps"] > 1)
    cut = data.draw(st.integers(1, asked["steps"] - 1))
    before = build(**{**asked, "steps": cut})
    after = build(**{**asked, "first_step": asked["first_step"] + cut, "steps": asked["steps"] - cut})
    assert before.final_versions == after.initial_versions
    assert after.final_versions == build(**asked).final_versions


@QUICK
@given(arguments(names=("2bw",)), st.data())
@pytest.mark.slow
def test_drains_change_no_version_number_of_2bw(asked, data):
    whole = build(**asked)
    lengths = []
    while sum(lengths) < asked["steps"]:
        lengths.append(data.draw(st.integers(1, asked["steps"] - sum(lengths))))
    read_in_pieces: dict[tuple[int, str, int], int] = {}
    first_step = asked["first_step"]
    for steps in lengths:
        piece = build(**{**asked, "first_step": first_step, "steps": steps})
        read_in_pieces |= {
            (a.stage, a.op, a.microbatch): a.version for a in piece.all_actions() if a.op != "U"
        }
        first_step += steps
    assert read_in_pieces == {
        (a.stage, a.op, a.microbatch): a.version for a in whole.all_actions() if a.op != "U"
    }
