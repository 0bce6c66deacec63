"""2bw folded into a V: no idle time, the delay of 2bw, and fewer activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Op, ScheduleError, analyze, build, find_problems, smallest_delay, verify
from schedules.costs import uniform_costs
from schedules.library.two_bw_v import block_of, least_microbatches
from schedules.library.v_block import MOST_COST, whole_costs
from schedules.simulate import simulate, throughput

GEOMETRIES = [(2, False), (2, True), (3, False), (5, True), (8, False), (8, True), (16, False)]


@pytest.mark.parametrize(("ranks", "split"), GEOMETRIES)
def test_no_rank_is_idle(ranks: int, split: bool) -> None:
    program = build("2bw-v", stages=ranks, microbatches=2 * ranks, steps=8, split=split)
    costs = uniform_costs(program, forward=1, input_half=1, weight_half=1)
    assert throughput(simulate(program, costs)).bubble == pytest.approx(0, abs=1e-9)


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
        assert throughput(simulate(program, costs)).bubble == pytest.approx(0, abs=1e-9)
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
        assert throughput(simulate(program, uniform_costs(program, **times))).bubble <= 0.02
    late = uniform_costs(program, forward=1, input_half=1, weight_half=1, latency=0.25)
    assert throughput(simulate(program, late)).bubble <= 0.02


@pytest.mark.parametrize(("ranks", "split"), GEOMETRIES)
def test_without_room_uneven_times_cost_what_six_of_the_longest_take(ranks: int, split: bool) -> None:
    """One of three equal times is x longer: at worst a micro-batch takes 6 (1 + x) instead of 6 + 2 x."""
    program = build("2bw-v", stages=ranks, microbatches=2 * ranks, steps=8, split=split)
    for off in ("forward", "input_half", "weight_half"):
        for more in (0.1, 0.2):
            for factor in (1 - more, 1 + more):
                times = {"forward": 1.0, "input_half": 1.0, "weight_half": 1.0, off: factor}
                bubble = throughput(simulate(program, uniform_costs(program, **times))).bubble
                assert bubble <= 2 * more / (3 * (1 + more)) + 1e-9


@pytest.mark.parametrize(("ranks", "split"), GEOMETRIES)
def test_delay_and_versions_are_those_of_2bw(ranks: int, split: bool) -> None:
    analysis = analyze(build("2bw-v", stages=ranks, microbatches=2 * ranks, steps=4, split=split))
    assert set(analysis.delay_max) == {1}
    assert set(analysis.mismatch_max) == {0}
    assert set(analysis.versions) == {2}


@pytest.mark.parametrize(
    ("split", "ahead", "shares"), [(False, 1, 0.75), (False, 2, 1), (True, 1, 0.5), (True, 2, 0.75)]
)
def test_activations_beside_those_of_2bw(split: bool, ahead: int, shares: float) -> None:
    """Of the fullest of 8 ranks, each of whose two stages is half of a stage of 2bw."""
    ours = analyze(build("2bw-v", stages=8, microbatches=24, steps=3, split=split, ahead=ahead))
    theirs = analyze(build("2bw", stages=8, microbatches=24, steps=3))
    assert max(ours.rank_activations) / 2 == shares * max(theirs.rank_activations)


@pytest.mark.parametrize(("ranks", "split"), GEOMETRIES)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 16])
def test_the_smallest_delay_is_the_first_whose_versions_are_there_in_time(
    ranks: int, split: bool, microbatches: int
) -> None:
    least = least_microbatches(block_of(ranks=ranks, ahead=1, split=split))
    if microbatches < least:
        with pytest.raises(ScheduleError, match=f"at least {least} micro-batches"):
            build("2bw-v", stages=ranks, microbatches=microbatches, steps=1, split=split)
        return
    delay = smallest_delay("2bw-v", stages=ranks, microbatches=microbatches, split=split)
    program = build("2bw-v", stages=ranks, microbatches=microbatches, steps=delay + 3, split=split)
    verify(program)
    assert max(analyze(program).delay_max) == delay
    if delay == 1:
        return
    with pytest.raises(ScheduleError, match=f"at least {delay}"):
        build("2bw-v", stages=ranks, microbatches=microbatches, steps=1, split=split, delay=delay - 1)
    # One less: the same order with every version read one newer.
    hasty = replace(
        program,
        actions=tuple(
            tuple(
                action
                if action.op is Op.UPDATE
                else action._replace(version=max(action.microbatch // microbatches - delay + 1, 0))
                for action in actions
            )
            for actions in program.actions
        ),
    )
    assert find_problems(hasty)
