"""The verifier finds what is wrong, and says where."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.schedule_cases import programs, run

from schedules import NO_MICROBATCH, Action, Op, Program, build, find_problems, parse_action, verify

PROGRAM = build("1f1b", stages=2, microbatches=2, steps=1)


def with_rank(program: Program, rank: int, text: str) -> Program:
    """`program` with the actions of one rank replaced by those that `text` prints."""
    actions = list(program.actions)
    actions[rank] = tuple(parse_action(word) for word in text.split())
    return replace(program, actions=tuple(actions))


@pytest.mark.parametrize(
    ("rank_1", "problem"),
    [
        ("1F0@0 1B0@0 1F1@0 1U1", "stage 1 never performs the backward of micro-batch 1"),
        ("1F0@0 1B0@0 1B1@0 1U1", "1B1@0: micro-batch 1 has no forward before this backward"),
        ("1F0@0 1B0@0 1U1", "stage 1 never forwards micro-batch 1"),
        ("1F0@0 1B0@0 1F1@0 1F1@0 1B1@0 1U1", "1F1@0: stage 1 forwards micro-batch 1 twice"),
        ("1F0@0 1B0@0 1F1@0 1B1@0 1B1@0 1U1", "1B1@0: stage 1 backwards micro-batch 1 twice"),
        ("1F0@0 1I0@0 1F1@0 1B1@0 1U1", "never performs the weight half of the backward of micro-batch 0"),
        ("1F0@0 1W0@0 1I0@0 1F1@0 1B1@0 1U1", "1W0@0: there is no input half 1I0 before this weight half"),
        ("1F0@0 1I0@0 1W0@0 1B0@0 1F1@0 1B1@0 1U1", "1B0@0: stage 1 backwards micro-batch 0 twice"),
        ("1F0@0 1B0@0 1F1@0 1B1@0", "ends with the gradient of micro-batches 0, 1 gathered and no update"),
        ("1F0@0 1B0@0 1F1@0 1B1@0 1U2", "1U2 writes version 2 where 1 is due"),
        ("1F0@0 1B0@0 1U1 1F1@0 1B1@0", "1U1 comes before the gradient of micro-batches 1 is gathered"),
        ("1F0@0 1B0@0 1F1@1 1B1@0 1U1", "1F1@1 reads version 1 while the newest of stage 1 is 0"),
        ("1F0@0 1B0@0 1F1@0 0B1@0 1U1", "rank 1, action 3 (0B1@0): stage 0 is on rank 0"),
        ("1F0@0 1B0@0 1F1@0 2B1@0 1U1", "rank 1, action 3 (2B1@0): there is no stage 2"),
        ("1F0@0 1B0@0 1F1@0 1B2@0 1U1", "rank 1, action 3 (1B2@0): the segment has 0 to 1"),
        (
            "1F1@0 1B1@0 1F0@0 1B0@0 1U1",
            "stage 0 sends the activations of micro-batch 0 as number 0 to stage 1",
        ),
    ],
)
def test_errors_name_their_place(rank_1, problem):
    assert find_problems(PROGRAM) == []
    assert any(problem in found for found in find_problems(with_rank(PROGRAM, 1, rank_1)))


def test_every_problem_is_reported():
    wrong = with_rank(with_rank(PROGRAM, 0, "0F0@0 0F1@0 0B0@0 0U1"), 1, "1F0@0 1B0@0 1F1@0 1B1@0 1U3")
    found = find_problems(wrong)
    assert any("stage 0 never performs the backward of micro-batch 1" in problem for problem in found)
    assert any("1U3 writes version 3" in problem for problem in found)


def test_a_backward_may_not_read_a_version_between_its_forwards_and_the_newest():
    program = build("pipedream", stages=3, microbatches=4, steps=1)
    text = " ".join(str(action) for action in program.actions[0])
    assert "0B2@0" in text
    wrong = with_rank(program, 0, text.replace("0B2@0", "0B2@1"))
    assert any(
        "0B2@1 must read the version of its forward (0) or the newest (2)" in problem
        for problem in find_problems(wrong)
    )


def test_a_version_that_the_stage_does_not_start_with_cannot_be_read():
    program = build("2bw", stages=2, microbatches=2, steps=1, first_step=3)
    wrong = replace(program, initial_versions=(3,), final_versions=(4,))
    assert find_problems(wrong) == [
        "stages 0 and 1: versions are read that a stage does not start with (it has 3); first 0F6@2; 8 in all"
    ]


def test_problems_of_one_kind_share_a_sentence():
    program = build("1f1b", stages=2, microbatches=4, steps=3)
    future = tuple(
        tuple(
            action if action.op is Op.UPDATE else action._replace(version=action.version + 1)
            for action in actions
        )
        for actions in program.actions
    )
    assert find_problems(replace(program, actions=future)) == [
        "stages 0 and 1: version k + 1 is read before it is written, where k is the newest; "
        "first 0F0@1; 48 in all"
    ]
    assert find_problems(replace(program, steps=4, final_versions=(4,)))[0] == (
        "stages 0 and 1: micro-batches have no forward; first micro-batch 12 of stage 0; 8 in all"
    )
    assert find_problems(replace(program, actions=program.actions[::-1])) == [
        "ranks 0 and 1: actions of other ranks' stages; "
        "first action 0 of rank 0 (1F0@0: stage 1 is on rank 1); 54 in all"
    ]


def test_a_segment_with_more_micro_batches_than_actions_is_refused_at_once():
    huge = replace(PROGRAM, steps=10**12, final_versions=(10**12,))
    assert find_problems(huge) == [
        "the segment has 2,000,000,000,000 micro-batches (steps 1000000000000, microbatches 2), "
        "and the program 10 actions"
    ]


def test_a_deadlock_is_told_as_the_chain_of_waits():
    # Stage 0 wants the gradient of micro-batch 0 before it sends micro-batch 1; stage 1 wants both forwards
    # first.
    wrong = with_rank(PROGRAM, 0, "0F0@0 0B0@0 0F1@0 0B1@0 0U1")
    wrong = with_rank(wrong, 1, "1F0@0 1F1@0 1B0@0 1B1@0 1U1")
    (problem,) = find_problems(wrong)
    assert problem.split("; ") == [
        "deadlock: rank 0 waits at 0B0@0 for stage 1's gradient of micro-batch 0, "
        "which rank 1 gives only after 1F1@0",
        "rank 1 waits at 1F1@0 for stage 0's activations of micro-batch 1, "
        "which rank 0 gives only after 0B0@0",
    ]


def test_a_rank_can_wait_for_itself():
    program = build("interleaved-1f1b", stages=1, microbatches=1, steps=1, chunks=2)
    (problem,) = find_problems(with_rank(program, 0, "1F0@0 0F0@0 1B0@0 1U1 0B0@0 0U1"))
    assert problem.startswith("deadlock: rank 0 waits at 1F0@0")


def test_full_channels_can_be_a_deadlock_where_unbounded_ones_are_none():
    # Stage 0 sends all its activations before it takes a gradient, stage 1 answers each at once.
    program = replace(PROGRAM, microbatches=4, update_interval=4)
    program = with_rank(program, 0, "0F0@0 0F1@0 0F2@0 0F3@0 0B0@0 0B1@0 0B2@0 0B3@0 0U1")
    program = with_rank(program, 1, "1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1F3@0 1B3@0 1U1")
    verify(program)
    (problem,) = find_problems(program, channel_capacity=1)
    assert "while the channel is full" in problem
    assert not run(program, capacity=1, chance=random.Random(0)).finished
    verify(program, channel_capacity=2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"microbatches": 0}, "microbatches is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"actions": ()}, "the number of ranks is 0"),
        ({"rank_of_stage": (0, 2)}, "stage 1 is placed on rank 2, but there are ranks 0 to 1"),
        ({"actions": (*PROGRAM.actions, ())}, "rank 2 has no stage"),
        ({"initial_versions": (1, 0)}, "the initial versions must be ascending"),
        ({"final_versions": ()}, "the final versions must be ascending and at least one"),
        (
            {"final_versions": (2,)},
            "stages 0 and 1: the last version is not 2; first version 1 of stage 0; 2 in all",
        ),
        ({"update_interval": 3}, "an update interval of 3 does not fit the end of the segment"),
    ],
)
def test_a_wrong_outline_is_named(change, problem):
    assert any(problem in found for found in find_problems(replace(PROGRAM, **change)))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(max_stages=6, max_microbatches=8), st.data())
def test_no_action_can_be_left_out_doubled_or_renamed(program, data):
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    actions = list(program.actions[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
    action = actions[place]
    change = data.draw(st.sampled_from(["leave out", "double", "micro-batch", "future version", "stage"]))
    if change == "leave out":
        del actions[place]
    elif change == "double":
        actions.insert(place, action)
    elif change == "micro-batch":
        new = NO_MICROBATCH if action.op is not Op.UPDATE else 0
        new = action.microbatch + 1 if new == NO_MICROBATCH else new
        if action.op is Op.UPDATE:
            actions[place] = Action(action.stage, Op.FORWARD, new, action.version)
        else:
            actions[place] = action._replace(microbatch=new)
    elif change == "future version":
        actions[place] = action._replace(version=program.final_versions[-1] + 1)
    else:
        actions[place] = action._replace(stage=program.num_stages)
    broken = replace(program, actions=(*program.actions[:rank], tuple(actions), *program.actions[rank + 1 :]))
    assert find_problems(broken)


def with_moved(program: Program, rank: int, place: int, to: int) -> Program:
    """`program` with one action of a rank at another place of its list."""
    actions = list(program.actions[rank])
    actions.insert(to, actions.pop(place))
    return replace(program, actions=(*program.actions[:rank], tuple(actions), *program.actions[rank + 1 :]))


@st.composite
def with_an_action_moved(draw):
    # Shuffling a rank's forwards among themselves and its backwards among themselves would break the order of
    # the messages; moving one action keeps it, and may or may not get the ranks stuck.
    program = draw(programs(max_stages=4, max_microbatches=4, max_steps=2))
    rank = draw(st.integers(0, program.num_ranks - 1))
    places = st.integers(0, len(program.actions[rank]) - 1)
    return with_moved(program, rank, draw(places), draw(places))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(with_an_action_moved())
# 3E1@1 between the updates of stages 3 and 1, which are one update of their rank.
@example(
    with_moved(
        build("gpipe", stages=2, microbatches=1, steps=2, shard_head=True, tied=True), rank=1, place=5, to=8
    )
)
def test_it_finds_a_deadlock_exactly_where_a_run_gets_stuck(program):
    problems = find_problems(program)
    if problems and not problems[0].startswith("deadlock"):
        return
    ran = run(program, capacity=None, chance=random.Random(0))
    assert ran.finished == (not problems)
