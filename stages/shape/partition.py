"""Cuts of a model into stages of equal cost. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from stages.config.run_config import ModelConfig, RunConfig
from stages.config.segments import schedule_facts
from stages.shape.families import describe
from stages.shape.head import rows_name, shard_rows
from stages.shape.moe import has_experts
from stages.shape.optimizer_sharding import Ownership, assign_owners
from stages.shape.spec import Parameter, Shape


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The parts of one stage: consecutive halves of blocks, and at the ends of the model the embedding or the
    head."""

    halves: range
    """Numbered as in `ModelSpec`: 2 b is the attention of block b, 2 b + 1 its MLP or experts."""
    has_embedding: bool
    has_head: bool
    """With the norm before it."""
    has_norm: bool = False
    """The norm before the head, without the head: that is in shards."""
    head_rows: range | None = None
    """Rows of the head's matrix, of a shard of it, which has nothing else. With `has_embedding` that is the
    embedding's matrix, too."""

    @property
    def blocks(self) -> range:
        """The blocks that it holds, of the first and the last perhaps a half."""
        return range(self.halves.start // 2, -(-self.halves.stop // 2))

    @property
    def pieces(self) -> tuple[range, ...]:
        """For each of its blocks, the halves that it holds."""
        return tuple(
            range(max(2 * block, self.halves.start), min(2 * block + 2, self.halves.stop))
            for block in self.blocks
        )

    @property
    def size(self) -> float:
        """Number of blocks, as in `parallel.cut`: an integer, or with .5 for a half."""
        whole, half = divmod(len(self.halves), 2)
        return whole + 0.5 if half else whole


@lru_cache(maxsize=256)  # a planner asks for the same stage again and again
def stage_parameters(config: ModelConfig, cut: StageCut) -> tuple[Parameter, ...]:
    """Parameters of a stage, in the module's order."""
    spec = describe(config)
    if cut.head_rows is not None:
        matrix = spec.tied or spec.head.parameters[-1]
        name = rows_name(matrix.name, cut.head_rows)
        return (matrix._replace(name=name, shape=(len(cut.head_rows), *matrix.shape[1:])),)
    held = spec.parameters(cut.halves, embedding=cut.has_embedding, head=cut.has_head)
    return (*held, *spec.norm.parameters) if cut.has_norm else tuple(held)


def ownership_of(parameters: Iterable[Parameter], *, data_ranks: int) -> Ownership:
    """Which data rank owns which members of a stage's parameters."""
    return _ownership(tuple(parameter.shape for parameter in parameters), data_ranks)


@lru_cache(maxsize=1024)  # the stages of a planner's layouts have the same shapes again and again
def _ownership(shapes: tuple[Shape, ...], data_ranks: int) -> Ownership:
    return assign_owners(shapes, data_ranks=data_ranks)


def owned_members(parameters: Sequence[Parameter], *, data_ranks: int) -> list[list[Parameter]]:
    """For each data rank, the members of a stage's parameters that it owns, as parameters."""
    members = [member for parameter in parameters for member in parameter.members()]
    owned = ownership_of(parameters, data_ranks=data_ranks).owned
    return [[members[number] for number in numbers] for numbers in owned]


def cut_of(config: RunConfig) -> list[StageCut]:
    """The stages of a run: as `parallel.cut` says, or else so that stages, or in a V ranks, are equally fast.

    Raises:
        ValueError: more stages than blocks.
    """
    shards, model, context = config.parallel.shard_head, config.model, config.data.context
    facts = schedule_facts(config)
    if config.parallel.cut is not None:
        cuts = stage_cuts(config.parallel.cut)
    elif facts.placement is None:
        cuts = cut_model(model, stages=facts.stages, context=context, has_head=not shards)
    else:
        cuts = cut_model_over_ranks(
            model, rank_of_stage=facts.placement, context=context, has_head=not shards
        )
    return with_head_shards(config, cuts) if shards else cuts


def with_head_shards(config: RunConfig, cuts: Sequence[StageCut]) -> list[StageCut]:
    """`cuts` of a run with the head in shards, which are stages of their own behind all others: one on each
    rank, and smaller on those whose blocks cost more. A tied model has its embedding there, too."""
    tied = config.model.tied
    first, *others = cuts
    *before, last = [replace(first, has_embedding=not tied), *others]
    ranks, placement = config.parallel.stages, schedule_facts(config).placement
    spec, context = describe(config.model), config.data.context
    costs = [half.forward_multiply_adds(context=context) for half in spec.halves]
    of_ranks = [0] * ranks
    for stage, cut in enumerate(cuts):
        rank = stage % ranks if placement is None else placement[stage]
        of_ranks[rank] += sum(costs[half] for half in cut.halves)
    vocabulary = config.model.vocab_size
    row = spec.head.forward_multiply_adds(context=context) // vocabulary
    return [
        *before,
        replace(last, has_head=False, has_norm=True),
        *(
            StageCut(halves=range(0), has_embedding=tied, has_head=False, head_rows=rows)
            for rows in shard_rows(vocabulary, row=row, others=tuple(of_ranks))
        ),
    ]


def cut_model(
    config: ModelConfig, *, stages: int, context: int, within_blocks: bool = False, has_head: bool = True
) -> list[StageCut]:
    """Contiguous stages whose slowest is as fast as possible; every stage holds at least one block.

    The embedding is a look-up and counts as free; the head counts in the last stage, with `has_head`. With
    `within_blocks`, a stage holds at least half a block, and the last may have the head alone.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks, head = _costs(config, stages=stages, context=context, has_head=has_head)
    if within_blocks:
        halves = tuple(half.forward_multiply_adds(context=context) for half in describe(config).halves)
        if not has_head:
            return stage_cuts([size / 2 for size in _equal_stages(halves, stages=stages)])
        *sizes, last = _equal_stages((*halves, head), stages=stages)
        return stage_cuts([size / 2 for size in (*sizes, last - 1)])
    return stage_cuts(_equal_stages(blocks, stages=stages, last_extra=head))


def cut_model_over_ranks(
    config: ModelConfig, *, rank_of_stage: tuple[int, ...], context: int, has_head: bool = True
) -> list[StageCut]:
    """Contiguous stages such that the slowest rank is as fast as possible; otherwise as `cut_model`.

    Raises:
        ValueError: more stages than blocks.
    """
    blocks, head = _costs(config, stages=len(rank_of_stage), context=context, has_head=has_head)
    return stage_cuts(_equal_ranks(blocks, head, rank_of_stage))


def _costs(config: ModelConfig, *, stages: int, context: int, has_head: bool) -> tuple[tuple[int, ...], int]:
    """Multiply-adds of each block and of the head."""
    if stages > config.layers:
        raise ValueError(f"{stages} stages need at least as many blocks, the model has {config.layers}")
    spec = describe(config)
    blocks = tuple(block.forward_multiply_adds(context=context) for block in spec.blocks)
    return blocks, has_head * spec.head.forward_multiply_adds(context=context)


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
    work = RankWork(
        rank_of_stage,
        lambda stage, size, _: stage_cost(blocks, (), stage, 2 * size) + head * (stage == last),
        alike=lambda stage: (stage == 0, stage == last),
    )
    cut = cut_over_ranks(items=len(blocks), work=work, fits=None)
    assert cut is not None, "at least one block per stage"
    return tuple(cut)


@lru_cache(maxsize=1024)  # a planner asks for the same cut again and again
def _equal_stages(costs: tuple[float, ...], *, stages: int, last_extra: float = 0.0) -> tuple[int, ...]:
    return tuple(balance(costs, stages=stages, last_extra=last_extra))


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
    first: dict[tuple[Any, ...], StageCut] = {}
    alike = []
    for cut in cuts:
        mlps = (half // 2 for half in cut.halves if half % 2)
        routed = sum(has_experts(config, block) for block in mlps) if config.experts else 0
        rows = 0 if cut.head_rows is None else len(cut.head_rows)
        ends = (cut.has_embedding, cut.has_head, cut.has_norm, rows)
        kind = (cut.halves.start % 2, len(cut.halves), routed, *ends)
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
            dearest, chosen = inf, 0
            for size in range(1, count - i - groups + 2):
                own, others = total[i + size] - total[i], best[groups - 1][i + size][0]
                if own > dearest:
                    break
                slower = max(own, others)
                if slower <= dearest:
                    dearest, chosen = slower, size
            row.append((dearest, chosen))
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
    costs: Callable[[int, bool], Sequence[float]],
    fits: Callable[[int, int, bool], bool] | None,
    step: int = 1,
    may_be_empty: bool = False,
) -> list[int] | None:
    """Items of each stage such that every stage fits its memory and the slowest is as fast as possible.

    Items are blocks, or halves of blocks. Dynamic programming over stages from the last. Among equally good
    cuts earlier stages get more, as in `balance`.

    Args:
        items: number of items.
        stages: number of stages.
        costs: `costs(stage, odd)[n]`: of a stage with n items, embedding and head included; `odd`: an odd
            number of items comes before it. It grows with the items, but is infinite where they are too few.
        fits: `fits(stage, items, odd)`: whether it fits; then it fits with fewer items, too. None: it does.
        step: items of a stage are a multiple of it, and at least as many.
        may_be_empty: the last stage may have no item.

    Returns:
        None where there is no such cut.
    """

    near = 1

    def most(stage: int, odd: bool) -> int:
        """The most items that fit."""
        nonlocal near
        if fits is None:
            return items
        # The stage before has room for about as many.
        near = _first_number(lambda n: not fits(stage, n * step, odd), end=items // step + 1, near=near)
        return step * (near - 1)

    odds = (False, True)[: 2 // step]
    least = [0 if may_be_empty and stage == stages - 1 else step for stage in range(stages)]
    # rows[stage][odd]: costs of its numbers of items, from `least` on; infinite ones are too few
    rows = [
        [costs(stage, odd)[least[stage] : most(stage, odd) + 1 : step] for odd in odds]
        for stage in range(stages)
    ]

    def largest(limit: float) -> list[int]:
        """Upper bounds of the items of each stage where none is slower than `limit`."""
        return [
            max(least[stage] + step * (_number_until(row, limit) - 1) for row in of_stage)
            for stage, of_stage in enumerate(rows)
        ]

    if sum(largest(inf)) < items:
        return None
    limits = sorted({cost for of_stage in rows for row in of_stage for cost in row})
    lowest = bisect_left(limits, True, key=lambda limit: sum(largest(limit)) >= items)
    for limit in (limits[lowest], inf):
        cut = _within(limit, items, rows, least=least, largest=largest(limit), step=step)
        if cut is not None:
            return cut
    return None


def _first_number(holds: Callable[[int], bool], *, end: int, near: int) -> int:
    """The first number from 1 that `holds`, as all after it do, or else `end`; from `near` on, in steps that
    double."""
    low, high, step = 1, end, 1
    while low <= near < high:
        if holds(near):
            high, near = near, near - step
        else:
            low, near = near + 1, near + step
        step *= 2
    return bisect_left(range(high), True, low, high, key=holds)


def _number_until(row: Sequence[float], limit: float) -> int:
    """Number of entries up to the last that is at most `limit`; they ascend after infinite ones."""
    if not row or row[-1] <= limit:
        return len(row)
    first = next((number for number, cost in enumerate(row) if cost < inf), len(row))
    until = bisect_right(row, limit, first)
    return until if until > first else 0


def _within(
    limit: float,
    items: int,
    rows: Sequence[Sequence[Sequence[float]]],
    *,
    least: Sequence[int],
    largest: Sequence[int],
    step: int,
) -> list[int] | None:
    """The cut of `fitting_cut` where no stage is slower than `limit`, and has more items than `largest`."""
    # slowest[n]: cost of the slowest later stage if they have n items; chosen[stage][n]: items of `stage`
    slowest = [0.0] + [inf] * items
    chosen: list[list[int]] = []
    before, after = sum(largest), 0
    for stage in reversed(range(len(rows))):
        before, after = before - largest[stage], after + largest[stage]
        row, sizes = [inf] * (items + 1), [0] * (items + 1)
        for count in range(least[stage], min(items, after) + 1, step):
            if count < items - before:
                continue
            dearest = inf
            size = least[stage]
            for own in rows[stage][(items - count) % 2 if step == 1 else 0]:
                if own > dearest or size > count or limit < own < inf:
                    break
                slower = slowest[count - size]
                if own > slower:
                    slower = own
                if slower <= dearest:
                    dearest, sizes[count] = slower, size
                size += step
            row[count] = dearest
        slowest = row
        chosen.append(sizes)
    if slowest[items] == inf:
        return None
    cut = []
    left = items
    for sizes in reversed(chosen):
        cut.append(sizes[left])
        left -= sizes[left]
    return cut


class RankWork:
    """How the stages of each rank divide its items, so that its slowest stage is as fast as possible, and
    what that costs. Among equally good ones earlier stages get more."""

    def __init__(
        self,
        rank_of_stage: Sequence[int],
        stage_cost: Callable[[int, int, bool], float],
        *,
        together: int = 1,
        may_be_empty: bool = False,
        alike: Callable[[int], Hashable] | None = None,
    ) -> None:
        """Prepare the ranks.

        Args:
            rank_of_stage: rank of each stage.
            stage_cost: `stage_cost(stage, items, odd)`: as `costs` of `fitting_cut`.
            together: items of a rank's stages but its first are a multiple of it.
            may_be_empty: the last stage may have no item; every other has one at least.
            alike: equal for stages of equal cost, which is computed for one of them; None: for none.
        """
        self.rank_of_stage = tuple(rank_of_stage)
        count = max(rank_of_stage) + 1
        self.held = [
            [stage for stage, holder in enumerate(rank_of_stage) if holder == rank] for rank in range(count)
        ]
        self._empty = len(rank_of_stage) - 1 if may_be_empty else None
        self.last_may_be_empty = self.held[-1] == [self._empty]
        self.stage_cost, self._together = stage_cost, together
        first: dict[Hashable, int] = {}
        kinds = [tuple((alike or int)(stage) for stage in stages) for stages in self.held]
        self._like = [first.setdefault(kind, rank) for rank, kind in enumerate(kinds)]
        self._shares: dict[tuple[int, int, bool], tuple[int, ...]] = {}
        """By rank, total and `odd`: the items of its stages."""
        self._costs: dict[tuple[int, int, int, bool], list[float]] = {}

    def sizes(self, rank: int, total: int, odd: bool) -> dict[int, int]:
        """Items of each of a rank's stages, once the rank's `costs` are known; `odd`: an odd number comes
        before its first stage. Where the total is too small, its stages have the least that they may have."""
        like = self._like[rank]
        least = self._smallest(like, total)
        share = least if total <= sum(least) else self._shares[like, total, odd]
        return dict(zip(self.held[rank], share, strict=True))

    def costs(self, items: int, step: int, rank: int, odd: bool) -> list[float]:
        """Costs of a rank with 0 to `items` items; infinite where a stage would have too few, or the items
        are no multiple of `step`."""
        like = self._like[rank]
        key = items, step, like, odd
        if key not in self._costs:
            costs = self._costs[key] = [inf] * (items + 1)
            for start in range(0, self._together, step):
                for sizes, cost in self._growing(like, start, odd, most=items):
                    self._shares[like, sum(sizes), odd] = sizes
                    costs[sum(sizes)] = cost
        return self._costs[key]

    def _stage_cost(self, rank: int, place: int, size: int, odd: bool) -> float:
        """Cost of so many items in a rank's stage number `place`."""
        return self.stage_cost(self.held[rank][place], size, odd and place == 0)

    def _growing(
        self, rank: int, total: int, odd: bool, *, most: int
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """The items of a rank's stages, and their cost: from the least that they may have, where one stage
        after another takes more, the one that is then fastest, up to `most` items."""
        sizes, more = list(self._smallest(rank, total)), self._together
        costs = [self._stage_cost(rank, place, size, odd) for place, size in enumerate(sizes)]
        grown, places = costs.copy(), range(len(sizes))
        while sum(sizes) <= most:
            yield tuple(sizes), sum(costs)
            if sum(sizes) + more > most:
                return
            for place in places:
                grown[place] = self._stage_cost(rank, place, sizes[place] + more, odd)
            fastest = grown.index(min(grown))
            sizes[fastest], costs[fastest] = sizes[fastest] + more, grown[fastest]
            places = range(fastest, fastest + 1)

    def _smallest(self, rank: int, total: int) -> tuple[int, ...]:
        first, *others = (0 if stage == self._empty else self._together for stage in self.held[rank])
        return (total - sum(others)) % self._together or first, *others


def cut_over_ranks(
    *,
    items: int,
    work: RankWork,
    fits: Callable[[dict[int, int], bool], bool] | None,
    step: int = 1,
) -> list[int] | None:
    """Items of each stage such that every rank fits its memory and the slowest rank is as fast as possible.

    Among equally good cuts earlier ranks get more. With one stage per rank this is `fitting_cut`.

    Args:
        items: number of items, as in `fitting_cut`.
        work: of the ranks.
        fits: `fits(sizes, odd)`: whether a rank fits, from the items of each of its stages; then it fits with
            fewer items, too. `odd`: an odd number comes before its first stage. None: all do.
        step: items of a rank's first stage are a multiple of it. Less than `together` only where the first
            stages of the ranks are the first of all, in the order of ranks.

    Returns:
        None where there is no such cut.
    """
    totals = fitting_cut(
        items=items,
        stages=len(work.held),
        costs=partial(work.costs, items, step),
        fits=fits and (lambda rank, total, odd: fits(work.sizes(rank, total, odd), odd)),
        step=step,
        may_be_empty=work.last_may_be_empty,
    )
    if totals is None:
        return None
    cut = [0] * len(work.rank_of_stage)
    before = 0
    for rank, total in enumerate(totals):
        for stage, size in work.sizes(rank, total, step == 1 and before % 2 == 1).items():
            cut[stage] = size
        before += total
    return cut
