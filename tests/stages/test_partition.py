from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.config import ModelConfig
from stages.partition import balance, cut_model

MODEL = ModelConfig(name="m", layers=6, width=32, heads=4, kv_heads=2, mlp_width=64)


def dearest(costs: list[float], sizes: list[int], last_extra: float) -> float:
    sums, first = [], 0
    for size in sizes:
        sums.append(sum(costs[first : first + size]))
        first += size
    sums[-1] += last_extra
    return max(sums)


@given(
    costs=st.lists(st.integers(1, 20).map(float), min_size=1, max_size=9),
    stages=st.integers(1, 9),
    last_extra=st.integers(0, 40).map(float),
)
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[float], stages: int, last_extra: float) -> None:
    stages = min(stages, len(costs))
    sizes = balance(costs, stages=stages, last_extra=last_extra)
    assert len(sizes) == stages
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    every_cut = (
        [end - start for start, end in zip((0, *places), (*places, len(costs)), strict=True)]
        for places in combinations(range(1, len(costs)), stages - 1)
    )
    assert dearest(costs, sizes, last_extra) == min(dearest(costs, cut, last_extra) for cut in every_cut)


@pytest.mark.parametrize("stages", range(1, 7))
def test_a_cut_holds_every_block_once_and_the_ends_at_the_ends(stages: int) -> None:
    cuts = cut_model(MODEL, stages=stages, context=16)
    assert [index for cut in cuts for index in cut.blocks] == list(range(6))
    assert [cut.has_embedding for cut in cuts] == [True] + [False] * (stages - 1)
    assert [cut.has_head for cut in cuts] == [False] * (stages - 1) + [True]


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ValueError, match="7 stages need at least as many blocks, the model has 6"):
        cut_model(MODEL, stages=7, context=16)


def test_a_large_head_leaves_the_last_stage_fewer_blocks() -> None:
    model = ModelConfig(name="m", layers=6, width=32, heads=4, kv_heads=2, mlp_width=64, vocab_size=1000)
    assert [len(cut.blocks) for cut in cut_model(model, stages=2, context=16)] == [5, 1]
