"""Cuts of a model into stages that fit the memory, and are as fast as possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from math import inf
from typing import NamedTuple

from asyncpp_cli.planner.alike import Settings
from asyncpp_cli.planner.bounds import most_blocks
from asyncpp_cli.planner.kept import kept
from asyncpp_cli.planner.planned_memory import (
    GB,
    MOST,
    OF_ACTIONS,
    fits,
    held_by_rank,
    message_sizes,
    parts_of_stages,
)
from asyncpp_cli.planner.representative import (
    Shape,
    messages,
    messages_at_most,
    represented,
    without_shards,
)
from asyncpp_cli.planner.stage_times import (
    Asked,
    CostModel,
    layout_cuts,
    own_cut_of,
    parts_of,
    recomputing,
    stage_times,
    whole_time,
)
from asyncpp_cli.planner.step_time import StageTimes
from optimizers import is_custom
from stages.config.run_config import RunConfig, changed
from stages.config.segments import schedule_facts
from stages.shape.partition import (
    RankWork,
    cut_model,
    cut_of,
    cut_over_ranks,
    stage_cost,
    stage_cuts,
)

WORTH_A_CUT = 0.01
"""Share of the step time that a cut must save to replace the default cut."""


def cuts_to_try(config: RunConfig, costs: CostModel, *, limit_gb: float | None) -> list[list[float]]:
    """The run's own cut, if it fits, and others that may fit, or be faster; empty where none fits."""
    own = own_cut_of(config)
    if limit_gb is None:
        return [own]
    if sum(most_blocks(config, limit_gb=limit_gb)) < config.model.layers:
        return []
    cuts = [own] if fits(config, own, limit_gb=limit_gb) else []
    if config.parallel.cut is None:
        cuts += [cut for cut in _other_cuts(config, costs, limit_gb=limit_gb) if cut != own]
    return cuts


def times_if_all_fits(config: RunConfig, costs: CostModel) -> dict[tuple[float, ...], StageTimes]:
    """Times of the stages of the cuts among which `estimate` chooses where memory does not matter."""
    cuts = [own_cut_of(config)]
    if config.parallel.cut is None:
        cuts += _other_cuts(config, costs, limit_gb=inf)
    return {tuple(cut): stage_times(config, layout_cuts(config, cut), costs) for cut in cuts}


def _other_cuts(config: RunConfig, costs: CostModel, *, limit_gb: float) -> Iterator[list[float]]:
    """Cuts besides the run's own that may fit, or be faster."""
    if not config.parallel.shard_head:
        for halves in _fitting_cuts(config, costs, limit_gb=limit_gb):
            yield [cut.size for cut in stage_cuts([size / 2 for size in halves])]
    elif (stages := schedule_facts(config).stages) == config.parallel.stages:
        # Shards of the head even out what stages of about equal work differ by.
        context = config.data.context
        within = cut_model(config.model, stages=stages, context=context, within_blocks=True, has_head=False)
        yield [cut.size for cut in within]


def _fitting_cuts(config: RunConfig, costs: CostModel, *, limit_gb: float) -> tuple[tuple[int, ...], ...]:
    """Of the cuts that fit, the one whose slowest rank is fastest, as halves of blocks in each stage: first
    of whole blocks, if one fits; then where the first stage of each rank may begin or end within a block, and
    the last of all have no block, if that rank is faster by `WORTH_A_CUT`."""
    rank_of_stage = represented(without_shards(config)).rank_of_stage
    parts = parts_of(Asked.of(config, costs))
    ends = [(stage == 0) * whole_time(parts.embedding) for stage in range(len(rank_of_stage))]
    ends[-1] += whole_time(parts.head)
    work = Work(
        tuple(whole_time(block) + recomputing(config, block) for block in parts.blocks),
        tuple(whole_time(half) + recomputing(config, half) for half in parts.halves),
        tuple(ends),
        rank_of_stage,
    )
    if limit_gb == inf:
        return _kept(_Search(work, limit_gb, None, None, config))
    search = _Search(work, limit_gb, Settings(config), Shape.of(config), config)
    # Code of the user's own may have changed.
    return (_searched if is_custom(config.optimizer.name) else _kept)(search)


class Work(NamedTuple):
    """What the stages of a layout compute, in seconds."""

    blocks: tuple[float, ...]
    halves: tuple[float, ...]
    """Of blocks."""
    ends: tuple[float, ...]
    """What the ends of the model add to each stage."""
    rank_of_stage: tuple[int, ...]


@dataclass(frozen=True)
class _Search:
    """What the cuts that fit depend on, as key of a cache."""

    work: Work
    limit_gb: float
    settings: Settings | None
    """This and the shape: None where everything fits."""
    shape: Shape | None
    config: RunConfig = field(compare=False, repr=False)


def _searched(search: _Search) -> tuple[tuple[int, ...], ...]:
    work, rank_of_stage, halves = search.work, search.work.rank_of_stage, len(search.work.halves)
    ranks = max(rank_of_stage) + 1
    cost = _rank_work(work, may_be_empty=False).stage_cost
    room = None if search.limit_gb == inf else _Room(search.config, limit_gb=search.limit_gb)

    def works_of(cut: Sequence[int]) -> list[float]:
        works, before = [0.0] * ranks, 0
        for stage, size in enumerate(cut):
            works[rank_of_stage[stage]] += cost(stage, size, before % 2 == 1)
            before += size
        return works

    def found(*, step: int, may_be_empty: bool = False, fast_enough: float = inf) -> Sequence[int] | None:
        # The fastest of all, or of those that fit without messages, is the fastest that fits, if it does.
        cut: Sequence[int] | None = _fastest_cut(work, step, may_be_empty)
        if cut is None or max(works_of(cut)) > fast_enough:
            return None
        if room is None or room.has_all(cut, step=step):
            return cut

        def fits(sizes: Mapping[int, int], within: bool, *, held: Sequence[int]) -> bool:
            first = min(sizes)
            works = (cost(stage, size, within and stage == first) for stage, size in sizes.items())
            return sum(works) <= fast_enough and room.has(sizes, within, held)

        of_ranks = _rank_work(work, may_be_empty=may_be_empty)
        search = partial(cut_over_ranks, items=halves, work=of_ranks, step=step)
        cut = search(fits=partial(fits, held=[0] * ranks))
        if cut is None or room.has_all(cut, step=step):
            return cut
        return search(fits=partial(fits, held=messages(*room.of_messages)))

    cuts: list[tuple[int, ...]] = []
    whole, fast_enough = found(step=2), inf
    if whole is not None:
        cuts.append(tuple(whole))
        works = works_of(whole)
        fast_enough = (1 - WORTH_A_CUT) * max(works)
        if sum(works) / ranks > fast_enough:
            return tuple(cuts)
    if rank_of_stage[:ranks] == tuple(range(ranks)):
        within = found(step=1, may_be_empty=True, fast_enough=fast_enough)
        if within is not None:
            cuts.append(tuple(within))
    return tuple(cuts)


_kept = kept(_searched)


class _Room:
    """Whether stages fit a memory: each part of it grows linearly with the blocks of a stage, up to its bound
    in `MOST`.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """

    def __init__(self, config: RunConfig, *, limit_gb: float) -> None:
        self.config, self.limit_gb = config, limit_gb
        self.run = represented(Shape.of(config))
        self.of_messages = Shape.of(config), message_sizes(config)
        self.at_most = messages_at_most(*self.of_messages)
        stages = len(self.run.rank_of_stage)
        self.one_block, self.two_blocks = (self._held_by([size] * stages) for size in (1, 2))
        dense = config.model.dense_layers
        self.two_dense = self._held_by([2] * stages, dense=True) if dense else self.two_blocks

    def _held_by(self, sizes: Sequence[float], *, dense: bool = False) -> list[dict[str, int]]:
        return [_summed(parts) for parts in parts_of_stages(_alike(self.config, dense=dense), sizes)]

    @cached_property
    def _shifted(self) -> list[dict[str, int]]:
        """All stages but the first begin within a block."""
        return self._held_by([1.5, *[1] * (len(self.one_block) - 1)])

    @cached_property
    def _uneven(self) -> list[dict[str, int]]:
        """Every second stage begins within a block, and all have a half more."""
        return self._held_by([1.5] * len(self.one_block))

    def has_all(self, cut: Sequence[int], *, step: int) -> bool:
        """Whether all ranks fit, whatever messages they hold."""
        before, rank_of_stage = 0, self.run.rank_of_stage
        for rank in range(self.config.parallel.stages):
            sizes = {stage: size for stage, size in enumerate(cut) if rank_of_stage[stage] == rank}
            if not self.has(sizes, step == 1 and before % 2 == 1, self.at_most):
                return False
            before += sum(sizes.values())
        return True

    def has(self, sizes: Mapping[int, int], within: bool, messages: Sequence[int]) -> bool:
        """Whether a rank fits.

        Args:
            sizes: halves of blocks in each of its stages.
            within: whether its first stage begins within a block.
            messages: bytes that each rank holds.
        """
        first = min(sizes)
        kept = {
            stage: self._parts_of(stage, sizes[stage], within and stage == first) for stage in sorted(sizes)
        }
        rank = self.run.rank_of_stage[first]
        held = sum(held_by_rank(kept, self.run, rank).values())
        return held + messages[rank] <= self.limit_gb * GB

    def _parts_of(self, stage: int, size: int, within: bool) -> dict[str, float]:
        whole, half = divmod(size, 2)
        dense = min(whole, self.config.model.dense_layers) if stage == 0 else 0
        held = {}
        for kind, first in self.one_block[stage].items():
            two = self.two_blocks[stage][kind]
            total = first + (whole - 1) * (two - first) - dense * (two - self.two_dense[stage][kind]) / 2
            if within or half:
                divided = max(0, self._shifted[stage][kind] - first) if stage else 0
                known = self._uneven[stage][kind] - first - stage % 2 * divided
                # An MLP more where the stage begins within a block, else an attention.
                more = known if within == (stage % 2 == 1) else two - first - known
                total += within * divided + half * more
            held[kind] = min(total, MOST.get(kind, inf))
        return held


def _summed(parts: dict[str, int]) -> dict[str, int]:
    """Parts of a stage, with one for all that lasts and has no bound."""
    summed = {"lasting": 0}
    for kind, size in parts.items():
        if kind in OF_ACTIONS or kind in MOST:
            summed[kind] = size
        else:
            summed["lasting"] += size
    return summed


@lru_cache(maxsize=256)
def _rank_work(work: Work, *, may_be_empty: bool) -> RankWork:
    @cache
    def cost_of(first: bool, end: float, size: int, within: bool) -> float:
        return stage_cost(work.blocks, work.halves, int(not first), size, within=within) + end

    return RankWork(
        work.rank_of_stage,
        lambda stage, size, within: cost_of(stage == 0, work.ends[stage], size, within),
        together=2,
        may_be_empty=may_be_empty,
        alike=lambda stage: (stage == 0, work.ends[stage]),
    )


@lru_cache(maxsize=1024)
def _fastest_cut(work: Work, step: int, may_be_empty: bool) -> tuple[int, ...] | None:
    """Halves of blocks in each stage where everything fits."""
    of_ranks = _rank_work(work, may_be_empty=may_be_empty)
    cut = cut_over_ranks(items=len(work.halves), work=of_ranks, fits=None, step=step)
    return None if cut is None else tuple(cut)


def _alike(config: RunConfig, *, dense: bool) -> RunConfig:
    """The same model with all of its blocks dense, or none of them that may have experts, and as many as any
    hypothetical cut has."""
    layers = 2 * len(cut_of(config))
    return changed(
        config,
        {
            "model.dense_layers": layers if dense else 0,
            "model.layers": layers if config.model.experts else 4,
        },
    )
