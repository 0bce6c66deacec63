from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.small_runs import Rows, small_config, with_experts

from stages.config.run_config import ModelConfig, changed
from stages.resolve.checks import check
from stages.shape.families import describe
from stages.shape.partition import (
    RankWork,
    balance,
    cut_model,
    cut_of,
    cut_over_ranks,
    fitting_cut,
    stage_cost,
)
from stages.trainer import replay

MODEL = ModelConfig(name="m", layers=6, width=32, heads=4, kv_heads=2, mlp_width=64)


def every_cut(items: int, stages: int, *, may_be_empty: bool = False) -> list[list[int]]:
    """All ways of giving items to stages in order; perhaps none to the last."""
    places = combinations(range(1, items + may_be_empty), stages - 1)
    return [[end - start for start, end in zip((0, *cut), (*cut, items), strict=True)] for cut in places]


def dearest(costs: Sequence[float], sizes: list[int], last_extra: float) -> float:
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
    cuts = every_cut(len(costs), stages)
    assert dearest(costs, sizes, last_extra) == min(dearest(costs, cut, last_extra) for cut in cuts)


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


@given(
    blocks=st.integers(4, 10),
    rank_of_stage=st.sampled_from([(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2), (0, 1, 2, 3), (0, 0, 0, 0)]),
    block=st.integers(1, 9),
    ends=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    room=st.integers(1, 10),
)
def test_no_other_cut_that_fits_has_a_faster_slowest_rank(
    blocks: int, rank_of_stage: tuple[int, ...], block: int, ends: tuple[int, int], room: int
) -> None:
    ranks = range(max(rank_of_stage) + 1)

    def cost(stage: int, size: int) -> float:
        return block * size + ends[0] * (stage == 0) + ends[1] * (stage == 3)

    def of_rank(cut: list[int], rank: int) -> dict[int, int]:
        return {stage: size for stage, size in enumerate(cut) if rank_of_stage[stage] == rank}

    def slowest(cut: list[int]) -> tuple[float, list[float]]:
        """The slowest rank; and of each rank its slowest stage."""
        costs = [[cost(*stage) for stage in of_rank(cut, rank).items()] for rank in ranks]
        return max(map(sum, costs)), [max(of_stages) for of_stages in costs]

    fitting = [
        cut
        for cut in every_cut(blocks, 4)
        if all(sum(of_rank(cut, rank).values()) <= room + rank for rank in ranks)
    ]
    found = cut_over_ranks(
        items=blocks,
        work=RankWork(rank_of_stage, lambda stage, size, _: cost(stage, size)),
        fits=lambda sizes, _: sum(sizes.values()) <= room + rank_of_stage[min(sizes)],
    )
    if not fitting:
        assert found is None
        return
    assert found in fitting
    assert slowest(found)[0] == min(slowest(cut)[0] for cut in fitting)
    totals = [sum(of_rank(found, rank).values()) for rank in ranks]
    alike = [cut for cut in fitting if [sum(of_rank(cut, rank).values()) for rank in ranks] == totals]
    for rank in ranks:
        assert slowest(found)[1][rank] == min(slowest(cut)[1][rank] for cut in alike)


@given(
    blocks=st.integers(1, 5),
    stages=st.integers(1, 4),
    attention=st.integers(1, 9),
    mlp=st.integers(1, 9),
    head=st.integers(0, 40),
)
def test_no_other_cut_within_blocks_has_a_faster_slowest_stage(
    blocks: int, stages: int, attention: int, mlp: int, head: int
) -> None:
    halves = blocks * [attention, mlp]
    found = cut_within_blocks(halves, rank_of_stage=tuple(range(stages)), head=head)
    slowest = [dearest(halves, cut, head) for cut in every_cut(2 * blocks, stages, may_be_empty=True)]
    assert (None if found is None else dearest(halves, found, head)) == min(slowest, default=None)


@given(
    blocks=st.integers(8, 16),
    rank_of_stage=st.sampled_from([(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 3, 3, 2, 1, 0), (0, 1, 2, 0, 1, 2)]),
    attention=st.integers(1, 9),
    mlp=st.integers(1, 9),
    head=st.integers(0, 40),
)
def test_a_cut_within_blocks_is_no_slower_than_one_between_them(
    blocks: int, rank_of_stage: tuple[int, ...], attention: int, mlp: int, head: int
) -> None:
    def slowest(cut: list[int]) -> int:
        work, first, last = dict.fromkeys(rank_of_stage, 0), 0, len(cut) - 1
        for stage, size in enumerate(cut):
            work[rank_of_stage[stage]] += sum(halves[first : first + size]) + head * (stage == last)
            first += size
        assert first == len(halves)
        return max(work.values())

    halves = blocks * [attention, mlp]
    last = len(rank_of_stage) - 1
    work = RankWork(rank_of_stage, lambda stage, size, _: size * (attention + mlp) + head * (stage == last))
    whole = cut_over_ranks(items=blocks, work=work, fits=None)
    within = cut_within_blocks(halves, rank_of_stage=rank_of_stage, head=head)
    assert whole is not None
    assert within is not None
    assert min(within[:-1]) >= 1
    assert slowest(within) <= slowest([2 * size for size in whole])


def cut_within_blocks(halves: list[int], *, rank_of_stage: tuple[int, ...], head: int) -> list[int] | None:
    """As the planner cuts, where everything fits."""
    last = len(rank_of_stage) - 1
    blocks = [attention + mlp for attention, mlp in zip(halves[::2], halves[1::2], strict=True)]
    work = RankWork(
        rank_of_stage,
        lambda stage, size, within: (
            stage_cost(blocks, halves, stage, size, within=within) + head * (stage == last)
        ),
        together=2,
        may_be_empty=True,
    )
    return cut_over_ranks(items=len(halves), work=work, fits=None, step=1)


def test_the_v_is_cut_so_that_ranks_are_equally_fast() -> None:
    """By stages, the best cut is 3, 3, 1, 1: a head of two blocks and the embedding are on rank 0."""
    config = small_config("2bw-v", layers=8)
    spec = describe(replace(config.model, vocab_size=1))
    per_word = spec.head.forward_multiply_adds(context=12)
    config = changed(
        config, {"model.vocab_size": round(2 * spec.blocks[0].forward_multiply_adds(context=12) / per_word)}
    )
    assert [len(cut.blocks) for cut in cut_of(config)] == [2, 3, 2, 1]


def test_dense_first_blocks_have_a_cost_of_their_own() -> None:
    """A dense block here costs about as much as six with experts."""
    config = with_experts(small_config("2bw", layers=9), dense_layers=1, active_experts=1)
    config = changed(config, {"model.mlp_width": 800})
    spec = describe(config.model)
    dense, routed = (spec.blocks[block].forward_multiply_adds(context=12) for block in (0, 1))
    head = spec.head.forward_multiply_adds(context=12)
    sizes = [len(cut.blocks) for cut in cut_of(config)]
    slowest = {size: max(dense + (size - 1) * routed, (9 - size) * routed + head) for size in range(1, 9)}
    assert sizes[0] == min(slowest, key=slowest.__getitem__) < 4
    in_a_v = replace(config, schedule=replace(config.schedule, name="2bw-v"))
    v_sizes = [len(cut.blocks) for cut in cut_of(in_a_v)]
    assert v_sizes[0] + v_sizes[3] < v_sizes[1] + v_sizes[2]


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("vocabulary", [256, 1000])
def test_the_default_cut_is_kept_where_everything_fits(stages: int, vocabulary: int) -> None:
    model = replace(MODEL, vocab_size=vocabulary)
    spec = describe(model)
    block, head = (part.forward_multiply_adds(context=16) for part in (spec.blocks[0], spec.head))
    cut = fitting_cut(
        items=6,
        stages=stages,
        costs=lambda stage, _: [size * block + head * (stage == stages - 1) for size in range(7)],
        fits=None,
    )
    assert cut == [len(of_stage.blocks) for of_stage in cut_model(model, stages=stages, context=16)]


def test_a_cut_that_is_asked_for_changes_nothing_but_the_cut() -> None:
    config = small_config("1f1b", precision="float64")
    asked = replace(config, parallel=replace(config.parallel, cut=[1, 3]))
    check(asked)
    assert [len(cut.blocks) for cut in cut_of(asked)] == [1, 3] != [len(cut.blocks) for cut in cut_of(config)]
    rows, by_default = Rows(), replay(config, recorder=Rows())
    as_asked = replay(asked, recorder=rows)
    counts = rows.of_kind("start")[0]["stage_parameters"]
    assert counts[0] < counts[1]
    for name, weight in by_default.weights.items():
        torch.testing.assert_close(as_asked.weights[name], weight, rtol=0, atol=1e-10)
