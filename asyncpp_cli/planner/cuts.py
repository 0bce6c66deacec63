"""Cuts of a model into stages that fit the memory, and are as fast as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

from asyncpp_cli.planner.memory import GB, RankMemory
from asyncpp_cli.planner.shared import Shared, own_cut_of, recomputing, whole_time
from stages.config.run_config import RunConfig
from stages.config.segments import schedule_facts
from stages.shape.partition import RankWork, StageCut, cut_model, cut_over_ranks, stage_cost

WORTH_A_CUT = 0.01
"""Share of the step time that a cut must save to replace the default cut."""


def cuts_to_try(config: RunConfig, shared: Shared, *, limit_gb: float | None) -> list[list[float]]:
    """The run's own cut, if it fits, and others that may fit, or be faster; empty where none fits.

    Args:
        config: of the run.
        shared: with its costs.
        limit_gb: memory of a device, 10^9 bytes; infinite: all fit; None: its own cut alone.
    """
    own = own_cut_of(config)
    if limit_gb is None:
        return [own]
    memory = None if limit_gb == inf else RankMemory(config, shared)

    def fits(cut: Sequence[float]) -> bool:
        return memory is None or memory.fits(cut, limit_gb=limit_gb)

    cuts = [own] if fits(own) else []
    if config.parallel.cut is not None:
        return cuts
    if memory is not None and not cuts and not memory.may_fit(limit_gb=limit_gb):
        return []
    if config.parallel.shard_head:
        others = _within_shards(config)
    else:
        others = _Search(config, shared, memory, limit_gb=limit_gb).cuts()
    return cuts + [cut for cut in others if cut != own and fits(cut)]


def rank_work(config: RunConfig, shared: Shared, *, may_be_empty: bool = False) -> RankWork:
    """What halves of blocks cost each rank of a layout, in seconds per micro-batch; `may_be_empty`: the last
    stage may have the head alone."""
    rank_of_stage, train = shared.placement(config), config.train

    def found() -> RankWork:
        parts = shared.parts(config)
        blocks = tuple(whole_time(block) + recomputing(config, block) for block in parts.blocks)
        halves = tuple(whole_time(half) + recomputing(config, half) for half in parts.halves)
        ends = [(stage == 0) * whole_time(parts.embedding) for stage in range(len(rank_of_stage))]
        ends[-1] += whole_time(parts.head)
        known: dict[tuple[bool, int, bool], float] = {}

        def cost(stage: int, size: int, within: bool) -> float:
            key = stage == 0, size, within
            if key not in known:
                known[key] = stage_cost(blocks, halves, stage, size, within=within)
            return known[key] + ends[stage]

        return RankWork(
            rank_of_stage,
            cost,
            together=2,
            may_be_empty=may_be_empty,
            alike=lambda stage: (stage == 0, ends[stage]),
        )

    key = (train.microbatch_size, train.recompute, rank_of_stage, config.parallel.data, may_be_empty)
    return shared.once(("work", *key), found)


def _within_shards(config: RunConfig) -> list[list[float]]:
    """The cut within blocks of a layout whose head is in shards: these even out what stages of about equal
    work differ by. None of several stages per rank."""
    stages, context = config.parallel.stages, config.data.context
    if schedule_facts(config).stages != stages:
        return []
    within = cut_model(config.model, stages=stages, context=context, within_blocks=True, has_head=False)
    return [[cut.size for cut in within]]


class _Search:
    """The search for cuts of a layout with the whole head in its last stage; `memory`: None: all fit."""

    def __init__(
        self, config: RunConfig, shared: Shared, memory: RankMemory | None, *, limit_gb: float
    ) -> None:
        self.config, self.shared, self.memory, self.limit_gb = config, shared, memory, limit_gb
        self.rank_of_stage = shared.placement(config)
        self.ranks, self.halves = config.parallel.stages, 2 * config.model.layers

    def cuts(self) -> list[list[float]]:
        """Blocks of each stage in the cut that fits and whose slowest rank is fastest: first of whole blocks,
        if one fits; then where the first stage of each rank may begin or end within a block, and the last of
        all have no block, if that rank is faster by `WORTH_A_CUT`."""
        found: list[list[float]] = []
        whole, fast_enough = self._fastest(step=2), inf
        if whole is not None:
            found.append([size / 2 for size in whole])
            works = self._works(whole)
            fast_enough = (1 - WORTH_A_CUT) * max(works)
            if sum(works) / self.ranks > fast_enough:
                return found
        if self.rank_of_stage[: self.ranks] == tuple(range(self.ranks)):
            within = self._fastest(step=1, fast_enough=fast_enough)
            if within is not None:
                found.append([size / 2 for size in within])
        return found

    def _works(self, cut: Sequence[int]) -> list[float]:
        works, before = [0.0] * self.ranks, 0
        cost = rank_work(self.config, self.shared).stage_cost
        for stage, size in enumerate(cut):
            works[self.rank_of_stage[stage]] += cost(stage, size, before % 2 == 1)
            before += size
        return works

    def _fastest(self, *, step: int, fast_enough: float = inf) -> Sequence[int] | None:
        """Halves of blocks in each stage: of all cuts the fastest, if that fits, or of those that fit."""
        work = rank_work(self.config, self.shared, may_be_empty=step == 1)
        train, data = self.config.train, self.config.parallel.data
        key = (train.microbatch_size, train.recompute, self.rank_of_stage, data, step)
        search = partial(cut_over_ranks, items=self.halves, work=work, step=step)
        cut = self.shared.once(("fastest", *key), lambda: search(fits=None))
        if cut is None or max(self._works(cut)) > fast_enough:
            return None
        memory = self.memory
        if memory is None or memory.fits([size / 2 for size in cut], limit_gb=self.limit_gb):
            return cut

        def fits(messages: Sequence[int], sizes: Mapping[int, int], within: bool) -> bool:
            first = min(sizes)
            works = (work.stage_cost(stage, size, within and stage == first) for stage, size in sizes.items())
            return sum(works) <= fast_enough and self._has_room(memory, sizes, within, messages)

        cut = search(fits=partial(fits, [0] * self.ranks))
        if cut is None or memory.fits([size / 2 for size in cut], limit_gb=self.limit_gb):
            return cut
        return search(fits=partial(fits, memory.messages))

    def _has_room(
        self, memory: RankMemory, sizes: Mapping[int, int], within: bool, messages: Sequence[int]
    ) -> bool:
        """Whether a rank fits with so many halves of blocks in its stages, the first of which begins within a
        block or not."""
        first, last = min(sizes), len(self.rank_of_stage) - 1
        dense = 2 * self.config.model.dense_layers if self.config.model.experts else 0
        cuts = {}
        for stage in sorted(sizes):
            # Where it begins does not matter, but for blocks of another kind.
            start = 0 if stage == 0 else dense + (within and stage == first)
            if stage == last and stage > 0:
                start = self.halves - sizes[stage]
            if not 0 <= start <= self.halves - sizes[stage]:
                return False
            halves = range(start, start + sizes[stage])
            cuts[stage] = StageCut(halves=halves, has_embedding=stage == 0, has_head=stage == last)
        rank = self.rank_of_stage[first]
        held = sum(memory.of_rank(rank, cuts).values())
        return held + messages[rank] <= self.limit_gb * GB
