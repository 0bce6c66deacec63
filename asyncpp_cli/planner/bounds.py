"""Lower bounds of a step's time, and upper ones of what fits, that need no step time: most layouts are passed
over by these alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import inf
from operator import add, lt
from typing import NamedTuple

import schedules
from asyncpp_cli.planner.alike import Settings, remembered
from asyncpp_cli.planner.costs.roofline import PartTimes
from asyncpp_cli.planner.planned_memory import GB
from asyncpp_cli.planner.representative import (
    least_lead,
    represented,
    traits,
    without_shards,
)
from asyncpp_cli.planner.stage_times import Asked, CostModel, least_work, parts_of, recomputing, shard_share
from asyncpp_cli.planner.step_time import StageTimes
from schedules.head_shards import FURTHER_AHEAD
from stages.config.run_config import RunConfig
from stages.config.segments import (
    has_tied_shards,
    schedule_facts,
    schedule_options,
)
from stages.memory.estimate import (
    microbatch_activations,
    sizes,
)
from stages.shape.families import describe
from stages.shape.partition import (
    StageCut,
    first_alike,
)


def least_seconds(
    config: RunConfig,
    costs: CostModel,
    *,
    in_flight: int | None = None,
    most_blocks: Sequence[float] | None = None,
) -> float:
    """A lower bound of the seconds of a step of a schedule of the family, for any cut the planner tries;
    infinite where none has so few blocks in each rank.

    A rank performs all micro-batches of blocks, at least one in each of its stages; the first may have a half
    less or more, and the last of all none. In a synchronous schedule with whole backwards it does so between
    the forwards of the stages before its own and their backwards; with split ones the first rank of several
    waits for its first gradient. Embedding and head count where they are, and reductions where nothing hides
    them. There are no more round trips at a time than micro-batches in flight in the first stage.

    Args:
        config: of the run.
        costs: of the model's parts.
        in_flight: the most micro-batches whose first backward has not begun, in the first stage; None: take
            the schedule's `lead`, if it has one.
        most_blocks: of each rank, as the function of that name has them; None: any number.
    """
    asked, ranks = Asked.of(config, costs), config.parallel.stages
    parts, work = parts_of(asked), _least_work(asked)
    microbatches, layers = config.schedule.microbatches, config.model.layers
    tied_shards = has_tied_shards(config)
    embedding, head = 0.0 if tied_shards else least_work(parts.embedding), least_work(parts.head)
    block, half, first_halves = work.block, min(work.first_halves), work.first_halves
    chunks = schedule_facts(config).stages // ranks
    schedule = schedules.find(config.schedule.name)
    split, in_a_v = traits(schedule.name)
    split |= config.schedule.split
    head_rank = 0 if in_a_v else ranks - 1
    shards = config.parallel.shard_head
    # A shard can be as small as its rank has no room for more.
    whole_head = 0.0 if shards else head
    hidden = in_a_v and not schedule.synchronous
    of_embedding, of_half, of_block = (0.0,) * 3 if hidden else _least_reductions(config, costs)
    of_embedding *= not tied_shards
    message = 2 * costs.message(config) * (ranks > 1)
    trip = message * chunks * (ranks - 1) + (work.split_trip if split else work.trip)
    if not tied_shards:
        trip += _trip(parts.embedding, split=split)
    if shards:
        # The slowest of them has no fewer rows than the mean, and waits for two messages.
        trip += shard_share(parts.head, 1 / ranks)[0] + message
    else:
        trip += _trip(parts.head, split=split)
    fills = schedule.synchronous and not split and not in_a_v
    # Halves of blocks that a rank has at least.
    least = [2 * chunks - 1 - min(2, 2 * chunks - 1) * (rank == head_rank) for rank in range(ranks)]

    # The halves of a stage are blocks' worth, but for one.
    allowed = [2 * layers] * ranks
    if most_blocks is not None:
        allowed = [min(2 * layers, 2 * int(min(blocks, layers)) + chunks) for blocks in most_blocks]

    if sum(allowed) < 2 * layers or any(map(lt, allowed, least)):
        return inf

    def most(seconds: float, of_block: float, of_half: float) -> int:
        """Halves that a rank can have, from the seconds that are left for them and those of each."""
        whole, rest = divmod(seconds, of_block)
        return 2 * int(whole) + (rest >= of_half)

    blocks_and_halves = microbatches * block, microbatches * half
    unhidden = microbatches * block + of_block / chunks, microbatches * half + of_half / chunks
    # Ranks beside one another that are alike are looked at as one, unless each waits for the one before it.
    of_ranks = [(rank == 0, rank == head_rank, allowed[rank], least[rank]) for rank in range(ranks)]
    groups = (
        [(bound, 1) for bound in of_ranks] if fills else [(key, len([*of])) for key, of in groupby(of_ranks)]
    )

    def enough(seconds: float) -> bool:
        total, before, others = 0, 0.0, sum(least)
        for (is_first, has_head, at_most, at_least), alike in groups:
            left = seconds - microbatches * (is_first * embedding + has_head * whole_head)
            count = min(at_most, most(left - before, *blocks_and_halves))
            if of_block:
                # A rank's first stage has as many halves as its others, but for two.
                reducing = left - of_embedding * is_first + of_block * (chunks > 1)
                count = min(count, most(reducing, *unhidden))
            if count < at_least:
                return False
            others -= alike * at_least
            if fills:
                count = min(count, 2 * layers - total - others)
                of_stage = count if chunks == 1 else max(1, count // chunks - 2)
                before += is_first * embedding + of_stage // 2 * block + of_stage % 2 * half + message
            total += alike * count
        return total >= 2 * layers

    def enough_within(seconds: float) -> bool:
        """`enough` for one stage per rank that nothing fills: a stage begins where the one before ends."""
        pair = min(block, sum(first_halves))

        def counts(left: float, reducing: float) -> list[int]:
            """Halves of a stage, by whether it begins within a block."""
            found = [most(left, microbatches * pair, microbatches * own) for own in first_halves]
            if of_block:
                unhidden = [
                    most(reducing, microbatches * pair + of_block, microbatches * own + of_half)
                    for own in first_halves
                ]
                found = [*map(min, found, unhidden)]
            return found

        reach = {0: 0}  # the most halves so far, by whether the next stage begins within a block
        alike = counts(seconds, seconds)
        for rank in range(ranks):
            of_rank = alike
            if rank in (0, head_rank):
                at_ends = (rank == 0) * embedding + (rank == head_rank) * whole_head
                left = seconds - microbatches * at_ends
                of_rank = counts(left, left - of_embedding * (rank == 0))
            further: dict[int, int] = {}
            for within, total in reach.items():
                count = min(of_rank[within], allowed[rank])
                for held in range(max(least[rank], count - 1), count + 1):
                    ends = (total + held) % 2
                    further[ends] = max(further.get(ends, 0), total + held)
            reach = further
        return max(reach.values(), default=0) >= 2 * layers

    is_enough = enough_within if chunks == 1 and not fills else enough
    low = microbatches * (embedding + work.blocks + head) / ranks
    if in_flight is None and schedule.lead is not None:
        lead = least_lead(schedule.name, stages=ranks, **schedule_options(config))
        assert lead is not None
        in_flight = 1 + shards + lead
    if in_flight is not None:
        turns = -(-microbatches // in_flight) if schedule.synchronous else microbatches / in_flight
        low = max(low, turns * trip)
    high = low
    while not is_enough(high * _ROUNDED):
        low, high = high, 1.5 * high
    while high > 1.002 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    # What is extrapolated from a few rounds can be less than a rank's work, as can a mean over steps of fewer
    # micro-batches than ranks whose stages update on their own.
    if schedule.synchronous and chunks > 1 and not in_a_v:
        return 0.98 * low
    return (0.97 if schedule.default_interval is not None and microbatches < ranks else 1.0) * low


class _LeastWork(NamedTuple):
    """Seconds of a micro-batch in blocks, recomputation among them."""

    blocks: float
    """All of them, with the cheaper kind of backward."""
    block: float
    """The cheapest one."""
    first_halves: tuple[float, float]
    """At the begin of a stage, the cheapest first half of a block, and the cheapest second."""
    trip: float
    """Forward and backward through all of them."""
    split_trip: float
    """The same with the input halves of backwards alone."""


@remembered
def _least_work(asked: Asked) -> _LeastWork:
    config, parts = asked.settings.config, parts_of(asked)
    blocks, halves = (
        [least_work(part) + recomputing(config, part) for part in of_kind]
        for of_kind in (parts.blocks, parts.halves)
    )
    again = sum(recomputing(config, block) for block in parts.blocks)
    trips = (again + sum(_trip(block, split=split) for block in parts.blocks) for split in (False, True))
    return _LeastWork(sum(blocks), min(blocks), (min(halves[::2]), min(halves[1::2])), *trips)


def _trip(part: PartTimes, *, split: bool) -> float:
    return part.forward + (part.input_half if split else part.backward)


_ROUNDED = 1 + 1e-9
"""Sums of the same times in another order differ by less than this share."""


def _least_reductions(config: RunConfig, costs: CostModel) -> tuple[float, float, float]:
    """Seconds of a step in which a rank waits for the reduction of its first stage, at least: of the
    embedding, of half a block and of a block.

    In a synchronous schedule that stage ends the rank's step and begins its next; where stages update on
    their own, the next action of each reads what it has updated.
    """
    schedule = schedules.find(config.schedule.name)
    spec, microbatches = describe(config.model), config.schedule.microbatches
    if config.parallel.data == 1 or not (schedule.synchronous or schedule.default_interval):
        return 0.0, 0.0, 0.0
    updates = 1.0
    if schedule.default_interval is not None:
        interval = config.schedule.update_interval or schedule.default_interval(microbatches)
        updates = microbatches / interval
    half, block = (min(part.parameter_count for part in of_kind) for of_kind in (spec.halves, spec.blocks))
    of_embedding, of_half, of_block = (
        updates * costs.reduction(config, count) for count in (spec.embedding.parameter_count, half, block)
    )
    return of_embedding, of_half, of_block


def least_with_times(config: RunConfig, times: StageTimes) -> float:
    """A lower bound of the seconds of a step of a schedule of the family whose stages take so long: a rank
    does its work; and where a step ends before the next begins, it waits before that for the first forwards
    of the stages before it, and after that the last backwards are still to come, unless they are split."""
    member, microbatches = schedules.find(config.schedule.name), config.schedule.microbatches
    ranks, rank_of_stage = config.parallel.stages, represented(without_shards(config)).rank_of_stage
    split = traits(member.name)[0] or config.schedule.split
    updates = 1.0
    if member.default_interval is not None:
        updates = microbatches / (config.schedule.update_interval or member.default_interval(microbatches))
    works, updating = [0.0] * ranks, [0.0] * ranks
    whole = map(min, times.whole(split=False), times.whole(split=True))
    shards = times.of_shards or (0.0,) * len(times.forward)
    holders = (*rank_of_stage, *range(len(times.forward) - len(rank_of_stage)))
    for rank, of_blocks, of_head, update in zip(holders, whole, shards, times.update, strict=True):
        works[rank] += microbatches * (of_blocks + of_head)
        updating[rank] += updates * update
    least: float = max(map(add, works, updating))
    if member.synchronous:
        waiting = 0.0
        for stage in range(ranks):
            least = max(least, waiting + works[rank_of_stage[stage]] + times.update[0] + times.reduction[0])
            waiting += times.forward[stage] + times.message
            waiting += 0.0 if split else times.backward[stage] + times.message
    return least


def most_blocks(config: RunConfig, *, limit_gb: float) -> list[float]:
    """For each rank an upper bound of the blocks that it holds in `limit_gb`: of their weights, gradients and
    activations alone, which are as many times those of a block.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    run, size = represented(without_shards(config)), sizes(config)
    spec = describe(config.model)
    count = min(block.parameter_count for block in spec.blocks)
    whole, half = _of_a_block(Settings(config))
    most = []
    for rank, moments in enumerate(run.course.moments):
        stages = [stage for stage, holder in enumerate(run.rank_of_stage) if holder == rank]
        versions = min(run.course.versions[stage] for stage in stages)
        activations = max(
            min(wholes * whole + halves * half for wholes, halves in moment.counts) for moment in moments
        )
        most.append(limit_gb * GB / (versions * count * size.replica + count * size.master + activations))
    return most


@remembered
def _of_a_block(settings: Settings) -> tuple[int, int]:
    """Bytes of a micro-batch in flight in a block, and of a half, at least."""
    model = settings.config.model
    halves = [range(2 * block, 2 * block + 2) for block in range(model.layers)]
    cuts = first_alike(
        model, [StageCut(halves=of_block, has_embedding=False, has_head=False) for of_block in halves]
    )
    whole, half = zip(*(microbatch_activations(settings.config, cut) for cut in set(cuts)), strict=True)
    return min(whole), min(half)


def in_flight(config: RunConfig) -> int:
    """Most micro-batches in the first stage whose first backward has not begun.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    of_first = represented(without_shards(config)).course.in_flight[0]
    return max(wholes for wholes, _ in of_first) + FURTHER_AHEAD * config.parallel.shard_head
