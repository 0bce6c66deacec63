"""The periodic block of a V: exact tiling, dependencies, and lifetimes; and of the schedules that are made of
it the mismatch of paci-v, and activations and bubble of V-Half and V-Min."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import analyze, build, verify
from schedules.costs import uniform_costs
from schedules.library.paci_v import mismatch_bounds
from schedules.library.two_bw_v import block_of
from schedules.library.v_block import VBlock, v_block
from schedules.step_time import step_time


@settings(max_examples=25)
@given(
    ranks=st.integers(1, 16),
    forward=st.integers(1, 3),
    backward=st.integers(1, 4),
    weight=st.integers(0, 2),
    message=st.integers(0, 4),
)
@pytest.mark.slow
def test_ranks_are_never_idle_and_messages_have_their_time(
    ranks: int, forward: int, backward: int, weight: int, message: int
) -> None:
    block = v_block(ranks=ranks, forward=forward, backward=backward, weight=weight, message=message)
    assert block.period == 2 * (forward + backward + weight)
    last = 2 * ranks - 1
    for rank in range(ranks):
        busy = [0] * block.period
        for stage in (rank, last - rank):
            spans = [(block.forward[stage], forward), (block.backward[stage], backward)]
            end = block.backward[stage] + backward
            if block.weight is not None:
                assert block.weight[stage] >= end
                spans.append((block.weight[stage], weight))
                end = block.weight[stage] + weight
            assert block.lifetimes[stage] == end - block.forward[stage]
            for start, cost in spans:
                for time in range(start, start + cost):
                    busy[time % block.period] += 1
        assert busy == [1] * block.period
    for stage in range(last):
        between = 0 if stage == ranks - 1 else message
        assert block.forward[stage + 1] >= block.forward[stage] + forward + between
        assert block.backward[stage] >= block.backward[stage + 1] + backward + between
    assert block.backward[last] >= block.forward[last] + forward


def fullest(block: VBlock) -> int:
    """The longest lifetime over ranks, both stages of a rank added."""
    return max(near + far for near, far in zip(block.lifetimes, reversed(block.lifetimes), strict=True))


@pytest.mark.parametrize(
    ("weight", "share"),
    [(0, {2: 1.75, 4: 2.75, 8: 5.75, 16: 10.75}), (1, {2: 1.5, 4: 22 / 12, 8: 3.5, 16: 70 / 12})],
)
def test_activations_of_the_fullest_rank(weight: int, share: dict[int, float]) -> None:
    """In micro-batches of a rank's share of the model: about 2 p / 3, and p / 3 with split backwards."""
    for ranks, expected in share.items():
        block = v_block(ranks=ranks, forward=1, backward=2 - weight, weight=weight, message=0)
        assert fullest(block) / block.period / 2 == pytest.approx(expected)


SOME = settings(max_examples=25)
RANKS = st.integers(2, 16)


@SOME
@given(ranks=RANKS, interval=st.integers(1, 8), times=st.integers(1, 4), ahead=st.integers(1, 2))
def test_mismatch_of_paci_v_is_that_of_the_formula(ranks: int, interval: int, times: int, ahead: int) -> None:
    microbatches = interval * times
    steps = 3 + 4 * ranks // microbatches
    program = build(
        "paci-v", stages=ranks, microbatches=microbatches, steps=steps, update_interval=interval, ahead=ahead
    )
    verify(program)
    analysis = analyze(program)
    bounds = mismatch_bounds(block_of(ranks=ranks, ahead=ahead, split=False), update_interval=interval)
    assert list(analysis.mismatch_max) == bounds
    assert set(analysis.versions) == {1}
    # With an update per backward it is the number of micro-batches in flight, less the one in question.
    if interval == 1:
        assert bounds == [count - 1 for count in analysis.activations]


def test_paci_v_is_never_idle_and_holds_the_activations_of_2bw_v() -> None:
    paci_v, two_bw_v = (build(name, stages=8, microbatches=16, steps=6) for name in ("paci-v", "2bw-v"))
    costs = uniform_costs(paci_v, forward=1, input_half=1, weight_half=1)
    assert step_time(paci_v, costs).bubble == pytest.approx(0, abs=1e-9)
    assert analyze(paci_v).rank_activations == analyze(two_bw_v).rank_activations


@SOME
@given(ranks=RANKS, further=st.integers(0, 40))
@pytest.mark.slow
def test_v_half_and_v_min_have_the_papers_share_of_activations_and_bubble(ranks: int, further: int) -> None:
    """A half and a third of 1F1B's activations up to a constant, and of its bubble B: B / 2 and 2 B / 3.

    Where p is odd, V-Half's block is shorter, and its bubble up to 0.54 B.
    """
    microbatches = ranks + further

    def bubble(name: str) -> float:
        program = build(name, stages=ranks, microbatches=microbatches, steps=6)
        costs = uniform_costs(program, forward=1, input_half=1, weight_half=1)
        return step_time(program, costs).seconds - 3 * microbatches

    of_1f1b = bubble("1f1b")
    assert of_1f1b == pytest.approx(3 * (ranks - 1))
    half = (ranks + 1, 0.54) if ranks % 2 else (ranks + 3, 1 / 2)
    for name, (stages_held, share) in {"v-half": half, "v-min": (2 * ranks / 3 + 3, 2 / 3)}.items():
        program = build(name, stages=ranks, microbatches=microbatches, steps=1)
        verify(program)
        assert program.split_backward
        # In activations of a stage: half of those of a rank's share.
        assert max(analyze(program).rank_activations) <= stages_held
        assert bubble(name) <= share * of_1f1b + 1e-9


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_steps_too_short_to_fill_the_v(name: str, microbatches: int) -> None:
    program = build(name, stages=4, microbatches=microbatches, steps=2)
    verify(program)
    assert max(analyze(program).rank_activations) <= 2 * microbatches
