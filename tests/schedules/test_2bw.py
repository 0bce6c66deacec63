"""PipeDream-2BW's program, against the row in the design and against its recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedules import Op, ScheduleError, analyze, build, smallest_delay, verify


def test_two_stages_and_two_microbatches_read_as_the_design_has_it():
    ranks = build("2bw", stages=2, microbatches=2, steps=4).actions
    first = " ".join(str(action) for action in ranks[0])
    last = " ".join(str(action) for action in ranks[1])
    assert first.startswith(
        "0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0U1 0F3@0 0B2@0 0F4@1 0B3@0 0U2 0F5@1 0B4@1 0F6@2 0B5@1 0U3"
    )
    assert last.startswith(
        "1F0@0 1B0@0 1F1@0 1B1@0 1U1 1F2@0 1B2@0 1F3@0 1B3@0 1U2 1F4@1 1B4@1 1F5@1 1B5@1 1U3 1F6@2"
    )


@pytest.mark.parametrize(("p", "m", "d"), [(1, 1, 1), (2, 1, 1), (3, 1, 2), (4, 3, 1), (5, 3, 2), (16, 2, 8)])
def test_the_smallest_delay_is_the_first_whose_versions_are_there_in_time(p, m, d):
    assert smallest_delay("2bw", stages=p, microbatches=m) == d
    program = build("2bw", stages=p, microbatches=m, steps=d + 2)
    verify(program)
    if d == 1:
        return
    # One less: the same order with every version read one newer.
    hasty = replace(
        program,
        actions=tuple(
            tuple(
                a if a.op == "U" else a._replace(version=max(a.microbatch // m - d + 1, 0)) for a in of_rank
            )
            for of_rank in program.actions
        ),
    )
    with pytest.raises(ScheduleError, match=r"read before it is written|while the newest of stage 0 is"):
        verify(hasty)
    with pytest.raises(ScheduleError, match=f"at least {d}"):
        build("2bw", stages=p, microbatches=m, steps=1, delay=d - 1)


def test_running_further_ahead_changes_the_order_and_no_version():
    asked = {"name": "2bw", "stages": 3, "microbatches": 4, "steps": 4}
    usual, further = build(**asked), build(**asked, ahead=2)
    first = " ".join(str(action) for action in further.actions[0])
    assert first.startswith(
        "0F0@0 0F1@0 0F2@0 0F3@0 0F4@0 0B0@0 0F5@0 0B1@0 0F6@0 0B2@0 0F7@0 0B3@0 0U1 0F8@1 0B4@0"
    )
    assert further.actions[2] == usual.actions[2]
    for stage in range(3):
        assert set(further.stage_actions(stage)) == set(usual.stage_actions(stage))
        backwards = [
            [action for action in program.stage_actions(stage) if action.op in (Op.BACKWARD, Op.UPDATE)]
            for program in (usual, further)
        ]
        assert backwards[0] == backwards[1]


@pytest.mark.parametrize(("ahead", "capacity"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_running_further_ahead_needs_room_in_the_channels(ahead, capacity):
    program = build("2bw", stages=5, microbatches=20, steps=2, ahead=ahead)
    verify(program, channel_capacity=capacity)
    if capacity > 1:
        with pytest.raises(ScheduleError, match="deadlock"):
            verify(program, channel_capacity=capacity - 1)


def test_a_segment_starts_with_the_versions_that_its_first_steps_read():
    assert build("2bw", stages=4, microbatches=2, steps=3, first_step=5).initial_versions == (3, 4, 5)
    assert build("2bw", stages=4, microbatches=2, steps=3, first_step=5).final_versions == (6, 7, 8)
    assert build("2bw", stages=4, microbatches=4, steps=1).initial_versions == (0,)


def test_after_synchronous_steps_the_first_step_has_no_delay() -> None:
    program = build("2bw", stages=3, microbatches=4, steps=3, first_step=5, delayed_from=5)
    verify(program)
    assert program.initial_versions == (5,)
    assert program.final_versions == (7, 8)
    read = [action.version for action in program.stage_actions(0) if action.op is Op.FORWARD]
    assert read == [5] * 8 + [6] * 4
    analysis = analyze(program)
    assert (analysis.delay_min, analysis.delay_max) == ((0, 0, 0), (1, 1, 1))
    with pytest.raises(ScheduleError, match="starts at step 4, and delay only at step 5"):
        build("2bw", stages=3, microbatches=4, steps=3, first_step=4, delayed_from=5)
