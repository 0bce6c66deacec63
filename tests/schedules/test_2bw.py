"""2bw against the row in the design and its recurrence; folded into a V: no idle time, the same delay, fewer
activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Op, ScheduleError, analyze, build, smallest_delay, verify
from schedules.costs import uniform_costs
from schedules.library.two_bw_v import block_of, least_microbatches
from schedules.library.v_block import MOST_COST, whole_costs
from schedules.step_time import step_time


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


GEOMETRIES = [(2, False), (2, True), (3, False), (5, True), (8, False), (8, True), (16, False)]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "options", "known"),
    [
        *(
            ("2bw", p, m, {}, d)
            for p, m, d in ((1, 1, 1), (2, 1, 1), (3, 1, 2), (4, 3, 1), (5, 3, 2), (16, 2, 8))
        ),
        *(("2bw-v", p, m, {"split": split}, None) for p, split in GEOMETRIES for m in (1, 2, 3, 5, 8, 16)),
    ],
)
def test_the_smallest_delay_is_the_first_whose_versions_are_there_in_time(
    name: str, ranks: int, microbatches: int, options: dict[str, bool], known: int | None
) -> None:
    asked: dict[str, Any] = {"stages": ranks, "microbatches": microbatches} | options
    least = least_microbatches(block_of(ranks=ranks, ahead=1, **options)) if options else 1
    if microbatches < least:
        with pytest.raises(ScheduleError, match=f"at least {least} micro-batches"):
            build(name, steps=1, **asked)
        return
    delay = smallest_delay(name, **asked)
    assert known in (None, delay)
    program = build(name, steps=delay + 3, **asked)
    verify(program)
    assert max(analyze(program).delay_max) == delay
    if delay == 1:
        return
    with pytest.raises(ScheduleError, match=f"at least {delay}"):
        build(name, steps=1, delay=delay - 1, **asked)
    # One less: the same order with every version read one newer.
    hasty = [
        tuple(
            action
            if action.op is Op.UPDATE
            else action._replace(version=max(action.microbatch // microbatches - delay + 1, 0))
            for action in actions
        )
        for actions in program.actions
    ]
    with pytest.raises(ScheduleError, match=r"read before it is written|while the newest of stage 0 is"):
        verify(replace(program, actions=tuple(hasty)))


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


@pytest.mark.parametrize(("ranks", "split"), GEOMETRIES)
def test_no_rank_is_idle_and_delay_and_versions_are_those_of_2bw(ranks: int, split: bool) -> None:
    program = build("2bw-v", stages=ranks, microbatches=2 * ranks, steps=8, split=split)
    costs = uniform_costs(program, forward=1, input_half=1, weight_half=1)
    assert step_time(program, costs).bubble == pytest.approx(0, abs=1e-9)
    analysis = analyze(program)
    assert set(analysis.delay_max) == {1}
    assert set(analysis.mismatch_max) == {0}
    assert set(analysis.versions) == {2}


TIMES = st.integers(1, 6)


@settings(max_examples=15)
@given(ranks=st.integers(1, 9), split=st.booleans(), times=st.tuples(TIMES, TIMES, TIMES))
@pytest.mark.slow
def test_no_rank_is_idle_at_the_costs_that_the_order_is_made_for(
    ranks: int, split: bool, times: tuple[int, int, int]
) -> None:
    microbatches = 4 * ranks
    for ahead in (1, 2):
        program = build(
            "2bw-v", stages=ranks, microbatches=microbatches, steps=8, split=split, ahead=ahead, costs=times
        )
        verify(program)
        forward, input_half, weight_half = times
        costs = uniform_costs(
            program,
            forward=forward,
            input_half=input_half,
            weight_half=weight_half,
            latency=(ahead - 1) * sum(times) / 6,
        )
        assert step_time(program, costs).bubble == pytest.approx(0, abs=1e-9)
        delay = smallest_delay(
            "2bw-v", stages=ranks, microbatches=microbatches, split=split, ahead=ahead, costs=times
        )
        assert max(analyze(program).delay_max) == delay


@given(times=st.tuples(*[st.floats(0.3, 3)] * 3), unit=st.floats(0.01, 100))
def test_whole_costs_are_in_proportion(times: tuple[float, float, float], unit: float) -> None:
    costs = whole_costs(*(time * unit for time in times))
    assert max(costs) <= MOST_COST
    for cost, time in zip(costs, times, strict=True):
        # Rounding at the finest grid: half a unit of the largest time's 24.
        assert cost / sum(costs) == pytest.approx(time / sum(times), abs=0.021)


@pytest.mark.parametrize("times", [(1, 1), (1, 0, 1), (1, 1, 25)])
def test_costs_that_are_not_accepted(times: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="whole numbers from 1 to 24"):
        build("2bw-v", stages=2, microbatches=4, steps=1, costs=times)
    with pytest.raises(ScheduleError, match="does not take costs"):
        build("2bw", stages=2, microbatches=4, steps=1, costs=(1, 2, 3))


@pytest.mark.parametrize(("ranks", "split"), GEOMETRIES)
@pytest.mark.parametrize("off", ["forward", "input_half", "weight_half"])
def test_a_sixth_of_a_microbatch_for_messages_absorbs_uneven_times(ranks: int, split: bool, off: str) -> None:
    program = build("2bw-v", stages=ranks, microbatches=2 * ranks, steps=8, split=split, ahead=2)
    for factor in (0.8, 1.2):
        times = {"forward": 1.0, "input_half": 1.0, "weight_half": 1.0, off: factor}
        assert step_time(program, uniform_costs(program, **times)).bubble <= 0.02
    late = uniform_costs(program, forward=1, input_half=1, weight_half=1, latency=0.25)
    assert step_time(program, late).bubble <= 0.02


@pytest.mark.parametrize(("ranks", "split"), GEOMETRIES)
def test_without_room_uneven_times_cost_what_six_of_the_longest_take(ranks: int, split: bool) -> None:
    """One of three equal times is x longer: at worst a micro-batch takes 6 (1 + x) instead of 6 + 2 x."""
    program = build("2bw-v", stages=ranks, microbatches=2 * ranks, steps=8, split=split)
    for off in ("forward", "input_half", "weight_half"):
        for more in (0.1, 0.2):
            for factor in (1 - more, 1 + more):
                times = {"forward": 1.0, "input_half": 1.0, "weight_half": 1.0, off: factor}
                bubble = step_time(program, uniform_costs(program, **times)).bubble
                assert bubble <= 2 * more / (3 * (1 + more)) + 1e-9


@pytest.mark.parametrize(
    ("split", "ahead", "shares"), [(False, 1, 0.75), (False, 2, 1), (True, 1, 0.5), (True, 2, 0.75)]
)
def test_activations_beside_those_of_2bw(split: bool, ahead: int, shares: float) -> None:
    """Of the fullest of 8 ranks, each of whose two stages is half of a stage of 2bw."""
    ours = analyze(build("2bw-v", stages=8, microbatches=24, steps=3, split=split, ahead=ahead))
    theirs = analyze(build("2bw", stages=8, microbatches=24, steps=3))
    assert max(ours.rank_activations) / 2 == shares * max(theirs.rank_activations)
