"""Cuts of a model into stages of equal cost. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any

from stages.config import ModelConfig, RunConfig
from stages.model.families.catalogue import describe
from stages.model.moe.settings import has_experts
from stages.model.spec import Parameter
from stages.pipeline.segments import schedule_facts
from stages.update.optimizer_sharding import assign_owners


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The parts of one stage: consecutive halves of blocks, and at the ends of the model the embedding or the
    head."""

    halves: range
    """Numbered as in `ModelSpec`: 2 b is the attention of block b, 2 b + 1 its MLP or experts."""
    has_embedding: bool
    has_head: bool

    @property
    def blocks(self) -> range:
        """The blocks that it holds, of the first and the last perhaps a half."""
        return range(self.halves.start // 2, -(-self.halves.stop // 2))

    @property
    def pieces(self) -> tuple[range, ...]:
        """Of each of its blocks, the halves that it holds."""
        return tuple(
            range(max(2 * block, self.halves.start), min(2 * block + 2, self.halves.stop))
            for block in self.blocks
        )

    @property
    def size(self) -> float:
        """Number of blocks, as in `parallel.cut`: an integer, or with .5 for a half."""
        whole, half = divmod(len(self.halves), 2)
        return whole + 0.5 if half else whole


def stage_parameters(config: ModelConfig, cut: StageCut) -> tuple[Parameter, ...]:
    """Parameters of a stage, in the module's order."""
    return _stage_parameters(tuple(vars(config).values()), cut)


@lru_cache(maxsize=256)  # a planner asks for the same stage again and again
def _stage_parameters(settings: tuple[Any, ...], cut: StageCut) -> tuple[Parameter, ...]:
    spec = describe(ModelConfig(*settings))
    return tuple(spec.parameters(cut.halves, embedding=cut.has_embedding, head=cut.has_head))


@lru_cache(maxsize=256)  # a planner asks for the same stage again and again
def owned_members(parameters: tuple[Parameter, ...], *, data_ranks: int) -> tuple[tuple[Parameter, ...], ...]:
    """For each data rank, the members of a stage's parameters that it owns, as parameters."""
    members = [member for parameter in parameters for member in parameter.members()]
    owned = assign_owners([parameter.shape for parameter in parameters], data_ranks=data_ranks).owned
    return tuple(tuple(members[number] for number in numbers) for numbers in owned)


def cut_of(config: RunConfig) -> list[StageCut]:
    """The stages of a run: as `parallel.cut` says, or else so that stages, or in a V ranks, are equally fast.

    Raises:
        ValueError: more stages than blocks.
    """
    if config.parallel.cut is not None:
        return stage_cuts(config.parallel.cut)
    facts = schedule_facts(config)
    if facts.placement is None:
        return cut_model(config.model, stages=facts.stages, context=config.data.context)
    return cut_model_over_ranks(config.model, rank_of_stage=facts.placement, context=config.data.context)


def cut_model(
    config: ModelConfig, *, stages: int, context: int, within_blocks: bool = False
) -> list[StageCut]:
    """Contiguous stages whose slowest is as fast as possible; every stage holds at least one block.

    The embedding is a look-up and counts as free; the head counts in the last stage. With `within_blocks`, a
    stage holds at least half a block, and the last may have the head alone.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks, head = _costs(config, stages=stages, context=context)
    if within_blocks:
        halves = [half.forward_multiply_adds(context=context) for half in describe(config).halves]
        *sizes, last = balance([*halves, head], stages=stages)
        return stage_cuts([size / 2 for size in (*sizes, last - 1)])
    return stage_cuts(_equal_stages(blocks, stages=stages, last_extra=head))


def cut_model_over_ranks(
    config: ModelConfig, *, rank_of_stage: tuple[int, ...], context: int
) -> list[StageCut]:
    """Contiguous stages such that the slowest rank is as fast as possible; otherwise as `cut_model`.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks, head = _costs(config, stages=len(rank_of_stage), context=context)
    return stage_cuts(_equal_ranks(blocks, head, rank_of_stage))


def _costs(config: ModelConfig, *, stages: int, context: int) -> tuple[tuple[int, ...], int]:
    """Multiply-adds of each block and of the head."""
    if stages > config.layers:
        raise ValueError(f"{stages} stages need at least as many blocks, the model has {config.layers}")
    spec = describe(config)
    blocks = tuple(block.forward_multiply_adds(context=context) for block in spec.blocks)
    return blocks, spec.head.forward_multiply_adds(context=context)


def stage_cost(
    blocks: Sequence[float], halves: Sequence[float], stage: int, size: int, *, within: bool = False
) -> float:
    """Cost of the halves of blocks of a stage by their number: blocks that differ from the last are the
    model's first, and count in the first stage.

    Args:
        blocks: cost of each block of the model.
        halves: of each of their halves.
        stage: number of the stage.
        size: halves in it.
        within: whether it begins within a block.
    """
    whole, half = divmod(size, 2)
    if stage == 0:
        return sum(blocks[:whole]) + (halves[2 * whole] if half else 0)
    return whole * blocks[-1] + (halves[-1 if within else -2] if half else 0)


@lru_cache(maxsize=1024)
def _equal_ranks(blocks: tuple[float, ...], head: float, rank_of_stage: tuple[int, ...]) -> tuple[int, ...]:
    last = len(rank_of_stage) - 1
    cut = cut_over_ranks(
        items=len(blocks),
        rank_of_stage=rank_of_stage,
        cost=lambda stage, size, _: stage_cost(blocks, (), stage, 2 * size) + head * (stage == last),
        fits=lambda sizes, _: True,
    )
    assert cut is not None, "at least one block per stage"
    return tuple(cut)


@lru_cache(maxsize=1024)  # a planner asks for the same cut again and again
def _equal_stages(blocks: tuple[float, ...], *, stages: int, last_extra: float) -> tuple[int, ...]:
    return tuple(balance(blocks, stages=stages, last_extra=last_extra))


def stage_cuts(sizes: Sequence[float]) -> list[StageCut]:
    """Stages with these numbers of blocks, multiples of a half."""
    ends = [0, *accumulate(int(2 * size) for size in sizes)]
    last = len(sizes) - 1
    return [
        StageCut(halves=range(first, end), has_embedding=stage == 0, has_head=stage == last)
        for stage, (first, end) in enumerate(pairwise(ends))
    ]


def first_alike(config: ModelConfig, cuts: Sequence[StageCut]) -> list[StageCut]:
    """For each stage, the first one with as many halves of each kind and the same ends of the model: what is
    computed of one holds for the other."""
    first: dict[tuple[int, int, int, bool, bool], StageCut] = {}
    alike = []
    for cut in cuts:
        mlps = (half // 2 for half in cut.halves if half % 2)
        routed = sum(has_experts(config, block) for block in mlps) if config.experts else 0
        kind = (cut.halves.start % 2, len(cut.halves), routed, cut.has_embedding, cut.has_head)
        alike.append(first.setdefault(kind, cut))
    return alike


def balance(costs: Sequence[float], *, stages: int, last_extra: float = 0.0) -> list[int]:
    """Sizes of contiguous groups of `costs`, none empty, that minimise the most expensive group.

    Dynamic programming over suffixes. Among equally good cuts earlier stages get more, since the last also
    computes the loss.

    Args:
        costs: of the items, in order.
        stages: number of groups.
        last_extra: added to the last group.
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[g][i]: cost of the most expensive group if items i.. form g groups, and the size of the first group
    best: list[list[tuple[float, int]]] = [
        [],
        [(total[count] - total[i] + last_extra, count - i) for i in range(count)],
    ]
    for groups in range(2, stages + 1):
        row = []
        for i in range(count - groups + 1):
            options = (
                (max(total[i + size] - total[i], best[groups - 1][i + size][0]), -size)
                for size in range(1, count - i - groups + 2)
            )
            dearest, negative_size = min(options)
            row.append((dearest, -negative_size))
        best.append(row)
    sizes = []
    first = 0
    for groups in range(stages, 0, -1):
        sizes.append(best[groups][first][1])
        first += sizes[-1]
    return sizes


def fitting_cut(
    *,
    items: int,
    stages: int,
    cost: Callable[[int, int, bool], float],
    fits: Callable[[int, int, bool], bool],
    step: int = 1,
    may_be_empty: bool = False,
) -> list[int] | None:
    """Items of each stage such that every stage fits its memory and the slowest is as fast as possible.

    Items are blocks, or halves of blocks. Dynamic programming over stages from the last. Among equally good
    cuts earlier stages get more, as in `balance`.

    Args:
        items: number of items.
        stages: number of stages.
        cost: `cost(stage, items, odd)`: of a stage with that many items, embedding and head included; `odd`:
            an odd number of items comes before it. It grows with the items.
        fits: `fits(stage, items, odd)`: whether it fits; then it fits with fewer items, too.
        step: items of a stage are a multiple of it, and at least as many.
        may_be_empty: the last stage may have no item.

    Returns:
        None where there is no such cut.
    """

    def most(stage: int, odd: bool) -> int:
        fitting = range(items, 0, -step)
        return items - step * bisect_left(fitting, True, key=lambda size: fits(stage, size, odd))

    never = float("inf")
    # slowest[n]: cost of the slowest later stage if they have n items; chosen[stage][n]: items of `stage`
    slowest = [0.0] + [never] * items
    chosen: list[list[int]] = []
    for stage in reversed(range(stages)):
        least = 0 if may_be_empty and stage == stages - 1 else step
        costs = [
            [cost(stage, size, odd) for size in range(least, most(stage, odd) + 1, step)]
            for odd in (False, True)[: 2 // step]
        ]
        row, sizes = [never] * (items + 1), [0] * (items + 1)
        for count in range(least, items + 1, step):
            dearest = never
            for number, own in enumerate(costs[(items - count) % 2 if step == 1 else 0]):
                size = least + step * number
                if own > dearest or size > count:
                    break
                if max(own, slowest[count - size]) <= dearest:
                    dearest, sizes[count] = max(own, slowest[count - size]), size
            row[count] = dearest
        slowest = row
        chosen.append(sizes)
    if slowest[items] == never:
        return None
    cut = []
    left = items
    for sizes in reversed(chosen):
        cut.append(sizes[left])
        left -= sizes[left]
    return cut


def cut_over_ranks(
    *,
    items: int,
    rank_of_stage: Sequence[int],
    cost: Callable[[int, int, bool], float],
    fits: Callable[[dict[int, int], bool], bool],
    step: int = 1,
    together: int = 1,
    may_be_empty: bool = False,
) -> list[int] | None:
    """Items of each stage such that every rank fits its memory and the slowest rank is as fast as possible.

    A rank's items are divided so that its slowest stage is as fast as possible. Among equally good cuts
    earlier ranks, and earlier stages of a rank, get more. With one stage per rank this is `fitting_cut`.

    Args:
        items: number of items, as in `fitting_cut`.
        rank_of_stage: rank of each stage.
        cost: as for `fitting_cut`.
        fits: `fits(sizes, odd)`: whether a rank fits, from the items of each of its stages; then it fits with
            fewer items, too. `odd`: an odd number comes before its first stage.
        step: items of a rank's first stage are a multiple of it. Less than `together` only where the first
            stages of the ranks are the first of all, in the order of ranks.
        together: likewise for its other stages.
        may_be_empty: the last stage may have no item; every other has one at least.

    Returns:
        None where there is no such cut.
    """
    ranks = max(rank_of_stage) + 1
    held = [[stage for stage, holder in enumerate(rank_of_stage) if holder == rank] for rank in range(ranks)]
    empty = len(rank_of_stage) - 1 if may_be_empty else None

    @cache
    def smallest(rank: int, total: int) -> dict[int, int]:
        sizes = {stage: 0 if stage == empty else together for stage in held[rank]}
        first = held[rank][0]
        return sizes | {first: (total - sum(sizes.values()) + sizes[first]) % together or sizes[first]}

    @cache
    def shared_out(rank: int, total: int, odd: bool) -> dict[int, int]:
        least = smallest(rank, total)
        if total <= sum(least.values()):
            return least
        sizes = shared_out(rank, total - together, odd)
        odd_stage = held[rank][0] if odd else None
        slower = min(sizes, key=lambda stage: cost(stage, sizes[stage] + together, stage == odd_stage))
        return sizes | {slower: sizes[slower] + together}

    def rank_cost(rank: int, total: int, odd: bool) -> float:
        if total < sum(smallest(rank, total).values()):
            return float("inf")
        odd_stage = held[rank][0] if odd else None
        sizes = shared_out(rank, total, odd)
        return sum(cost(stage, size, stage == odd_stage) for stage, size in sizes.items())

    totals = fitting_cut(
        items=items,
        stages=ranks,
        cost=rank_cost,
        fits=lambda rank, total, odd: fits(shared_out(rank, total, odd), odd),
        step=step,
        may_be_empty=held[-1] == [empty],
    )
    if totals is None:
        return None
    cut = [0] * len(rank_of_stage)
    before = 0
    for rank, total in enumerate(totals):
        for stage, size in shared_out(rank, total, step == 1 and before % 2 == 1).items():
            cut[stage] = size
        before += total
    return cut
