"""Cuts of a model into stages of equal cost. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
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


def cut_model(config: ModelConfig, *, stages: int, context: int) -> list[StageCut]:
    """Contiguous stages whose slowest is as fast as possible; every stage holds at least one block.

    The embedding is a look-up and counts as free; the head counts in the last stage.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks, head = _costs(config, stages=stages, context=context)
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


def stage_cost(blocks: Sequence[float], stage: int, size: int) -> float:
    """Cost of the blocks of a stage by their number: blocks that differ from the last are the model's first,
    and count in the first stage.

    Args:
        blocks: cost of each block of the model.
        stage: number of the stage.
        size: blocks in it.
    """
    return sum(blocks[:size]) if stage == 0 else size * blocks[-1]


@lru_cache(maxsize=1024)
def _equal_ranks(blocks: tuple[float, ...], head: float, rank_of_stage: tuple[int, ...]) -> tuple[int, ...]:
    last = len(rank_of_stage) - 1
    cut = cut_over_ranks(
        blocks=len(blocks),
        rank_of_stage=rank_of_stage,
        cost=lambda stage, size: stage_cost(blocks, stage, size) + head * (stage == last),
        fits=lambda sizes: True,
    )
    assert cut is not None, "at least one block per stage"
    return tuple(cut)


@lru_cache(maxsize=1024)  # a planner asks for the same cut again and again
def _equal_stages(blocks: tuple[float, ...], *, stages: int, last_extra: float) -> tuple[int, ...]:
    return tuple(balance(blocks, stages=stages, last_extra=last_extra))


def stage_cuts(sizes: Sequence[float]) -> list[StageCut]:
    """Stages with these numbers of blocks, multiples of a half."""
    ends = [0, *accumulate(int(2 * size) for size in sizes)]
    return [
        StageCut(halves=range(first, end), has_embedding=first == 0, has_head=end == ends[-1])
        for first, end in pairwise(ends)
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
    blocks: int,
    stages: int,
    cost: Callable[[int, int], float],
    fits: Callable[[int, int], bool],
) -> list[int] | None:
    """Blocks of each stage such that every stage fits its memory and the slowest is as fast as possible.

    Dynamic programming over stages from the last. Among equally good cuts earlier stages get more, as in
    `balance`.

    Args:
        blocks: number of blocks.
        stages: number of stages, each with at least one block.
        cost: `cost(stage, blocks)`: of a stage with that many blocks, embedding and head included.
        fits: `fits(stage, blocks)`: whether it fits; then it fits with fewer blocks, too.

    Returns:
        None where there is no such cut.
    """
    never = float("inf")
    # slowest[n]: cost of the slowest later stage if they have n blocks; chosen[stage][n]: blocks of `stage`
    slowest = [0.0] + [never] * blocks
    chosen: list[list[int]] = []
    for stage in reversed(range(stages)):
        most = blocks - bisect_left(range(blocks, 0, -1), True, key=partial(fits, stage))
        costs = [0.0, *(cost(stage, size) for size in range(1, most + 1))]
        row, sizes = [never] * (blocks + 1), [0] * (blocks + 1)
        for count in range(1, blocks + 1):
            for size in range(min(most, count), 0, -1):
                dearest = max(costs[size], slowest[count - size])
                if dearest < row[count]:
                    row[count], sizes[count] = dearest, size
        slowest = row
        chosen.append(sizes)
    if slowest[blocks] == never:
        return None
    cut = []
    left = blocks
    for sizes in reversed(chosen):
        cut.append(sizes[left])
        left -= sizes[left]
    return cut


def cut_over_ranks(
    *,
    blocks: int,
    rank_of_stage: Sequence[int],
    cost: Callable[[int, int], float],
    fits: Callable[[dict[int, int]], bool],
) -> list[int] | None:
    """Blocks of each stage such that every rank fits its memory and the slowest rank is as fast as possible.

    A rank's blocks are divided so that its slowest stage is as fast as possible. Among equally good cuts
    earlier ranks, and earlier stages of a rank, get more. With one stage per rank this is `fitting_cut`.

    Args:
        blocks: number of blocks.
        rank_of_stage: rank of each stage; each has at least one block.
        cost: `cost(stage, blocks)`: of a stage with that many blocks, embedding and head included.
        fits: whether a rank fits, from the blocks of each of its stages; then it fits with fewer blocks, too.

    Returns:
        None where there is no such cut.
    """
    ranks = max(rank_of_stage) + 1
    held = [[stage for stage, holder in enumerate(rank_of_stage) if holder == rank] for rank in range(ranks)]

    @cache
    def shared_out(rank: int, total: int) -> dict[int, int]:
        if total <= len(held[rank]):
            return dict.fromkeys(held[rank], 1)
        sizes = shared_out(rank, total - 1)
        slower = min(sizes, key=lambda stage: cost(stage, sizes[stage] + 1))
        return sizes | {slower: sizes[slower] + 1}

    def rank_cost(rank: int, total: int) -> float:
        if total < len(held[rank]):
            return float("inf")
        return sum(cost(stage, size) for stage, size in shared_out(rank, total).items())

    totals = fitting_cut(
        blocks=blocks,
        stages=ranks,
        cost=rank_cost,
        fits=lambda rank, total: fits(shared_out(rank, total)),
    )
    if totals is None:
        return None
    sizes = {
        stage: size for rank, total in enumerate(totals) for stage, size in shared_out(rank, total).items()
    }
    return [sizes[stage] for stage in range(len(rank_of_stage))]
