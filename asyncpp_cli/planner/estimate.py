"""Estimates memory and step time of a run from its configuration and the costs of the model's parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from math import inf
from operator import add, lt
from typing import Any, Protocol

import schedules
from asyncpp_cli.planner.costs.roofline import ModelTimes, PartTimes
from asyncpp_cli.planner.peak_memory import (
    allocator_bytes,
    backward_bytes,
    communicator_bytes,
    forward_bytes,
    slot_bytes,
    update_bytes,
)
from asyncpp_cli.planner.representative import (
    Represented,
    Shape,
    messages,
    messages_at_most,
    represented,
    without_shards,
)
from asyncpp_cli.planner.step_time import (
    StageTimes,
    StepTime,
    sharded_step,
    simulated_step,
    step_time,
    unflushed_step,
)
from asyncpp_cli.runs.settings import copy_of
from schedules import Op
from schedules.catalogue import least_lead
from schedules.head_shards import FURTHER_AHEAD
from schedules.messages import Kind, channels_between_ranks
from schedules.simulate import steps_to_measure
from stages.comm.reduction_rounds import ROUND_BYTES, UNDER_WAY
from stages.config.run_config import RunConfig, tokens_per_step
from stages.config.segments import (
    has_tied_shards,
    schedule_facts,
    schedule_options,
    segment_program,
    sync_steps,
)
from stages.memory.estimate import (
    StageMemory,
    lasting_bytes,
    message_bytes,
    microbatch_activations,
    reduction_bytes,
    sizes,
    stage_memory,
)
from stages.shape.families import describe
from stages.shape.partition import (
    RankWork,
    StageCut,
    cut_model,
    cut_of,
    cut_over_ranks,
    first_alike,
    owned_members,
    stage_cost,
    stage_cuts,
    stage_parameters,
    with_head_shards,
)
from stages.shape.spec import Parameter

GB = 1e9
WORTH_A_CUT = 0.01
"""Share of the step time that a cut must save to replace the default cut."""

MOST = {"reduction": 2 * UNDER_WAY * ROUND_BYTES}
"""Upper bounds of kinds of memory, bytes."""
OF_THE_DEVICE = ("communicators", "allocator")
"""Kinds of memory outside of tensors."""


class CostModel(Protocol):
    """Seconds of the model's parts and of communication, estimated or measured."""

    @property
    def source(self) -> str:
        """Where the times come from, for display."""

    @property
    def threads(self) -> int | None:
        """Cores of a rank; None: the times are those of a GPU."""

    def parts(self, config: RunConfig) -> ModelTimes:
        """A micro-batch in each part of the model."""

    def update(self, config: RunConfig, parameters: Sequence[Parameter]) -> float:
        """An optimizer step on these parameters."""

    def reduction(self, config: RunConfig, parameters: int) -> float:
        """Reduce-scatter of a stage's gradients and all-gather of its weights, over the data ranks."""

    def message(self, config: RunConfig) -> float:
        """A message from one stage to the next."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory and step time of a run."""

    config: RunConfig
    cut: tuple[float, ...]
    """Number of blocks in each stage, as in `parallel.cut`."""
    rank_of_stage: tuple[int, ...]
    step: StepTime
    delay: int
    """Maximum number of updates between the weights a gradient is computed at and those it is applied to."""

    @cached_property
    def memory(self) -> tuple[dict[str, int], ...]:
        """Bytes of each rank at its fullest moment, by kind: those of `StageMemory`, `messages`, `reduction`,
        `temporary` and those `OF_THE_DEVICE`. Its stages need not hold their most at once.

        Messages take longer to count than all else, so they are where this is read.
        """
        return tuple(planned_memory(self.config, self.cut))

    @property
    def name(self) -> str:
        """Of the layout, in tables: its schedule with its options."""
        schedule = self.config.schedule
        takes_chunks = "chunks" in schedules.options_taken(schedule.name)
        name: str = schedule.name
        name += f" x {schedule.chunks}" if takes_chunks and schedule.chunks > 1 else ""
        name += ", split" * schedule.split + f", ahead {schedule.ahead}" * (schedule.ahead > 1)
        return name + ", head in shards" * self.config.parallel.shard_head

    @property
    def place(self) -> str:
        """The schedule and the ranks."""
        parallel = self.config.parallel
        stages = f"{parallel.stages} stage{'s' * (parallel.stages > 1)}"
        return f"{self.config.schedule.name} with {stages} x {parallel.data}"

    @property
    def own_cut(self) -> bool:
        """Whether `cut` is the run's own; otherwise `parallel.cut` must set it."""
        return list(self.cut) == _own_cut(self.config)

    @property
    def stages(self) -> list[StageMemory]:
        """What each stage holds at its own peak."""
        config = copy_of(self.config)
        config.parallel.cut = list(self.cut)
        run = represented(Shape.of(config))
        return stage_memory(config, run.course, gradient_buffers=run.buffers)

    @property
    def rank_gb(self) -> list[float]:
        """Memory of each rank, 10^9 bytes."""
        return [sum(kinds.values()) / GB for kinds in self.memory]

    @property
    def memory_gb(self) -> float:
        """Memory of the fullest rank, 10^9 bytes."""
        return max(self.rank_gb)

    def exceeds(self, limit_gb: float) -> bool:
        """Whether a rank needs more memory, 10^9 bytes."""
        return not fits(self.config, self.cut, limit_gb=limit_gb)

    @property
    def tokens_per_second(self) -> float:
        return tokens_per_step(self.config) / self.step.seconds


def estimate(config: RunConfig, costs: CostModel, *, limit_gb: float | None) -> Estimate:
    """Estimate memory and step time of `config`.

    Args:
        config: a valid configuration.
        costs: times of the model's parts.
        limit_gb: memory of a device, 10^9 bytes. Where `parallel.cut` is null, another cut replaces the
            default one if that does not fit or is slower. None: keep the run's own cut.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    return fitting(config, costs, limit_gb=limit_gb) or own_estimate(config, costs)


def own_estimate(config: RunConfig, costs: CostModel) -> Estimate:
    """As `estimate`, with the run's own cut."""
    own = _own_cut(config)
    return _with_cut(config, own, step_of(config, own, costs))


def fitting(
    config: RunConfig,
    costs: CostModel,
    *,
    limit_gb: float | None,
    timed: Mapping[tuple[float, ...], StepTime] | None = None,
) -> Estimate | None:
    """As `estimate`, or None where no cut fits: then no time is simulated.

    `timed`: step times that are known, by cut.
    """
    best, too_large, own, known = None, False, _own_cut(config), timed or {}
    for cut in _cuts(config, costs, limit_gb=limit_gb):
        if best is not None and cut == list(best.cut):
            continue
        changed = _with_cut(config, cut, known.get(tuple(cut)) or step_of(config, cut, costs))
        # The memory that it was chosen by is interpolated.
        exceeds = limit_gb is not None and cut != own and changed.exceeds(limit_gb)
        is_faster = best is None or changed.step.seconds <= (1 - WORTH_A_CUT) * best.step.seconds
        if best is None or (is_faster and not exceeds) or (too_large and not exceeds):
            best, too_large = changed, exceeds
    return best


def times_if_all_fits(config: RunConfig, costs: CostModel) -> dict[tuple[float, ...], StageTimes]:
    """Times of the stages of the cuts among which `estimate` chooses where memory does not matter."""
    cuts = [_own_cut(config)]
    if config.parallel.cut is None:
        cuts += _other_cuts(config, costs, limit_gb=inf)
    return {tuple(cut): stage_times(config, layout_cuts(config, cut), costs) for cut in cuts}


def _cuts(config: RunConfig, costs: CostModel, *, limit_gb: float | None) -> list[list[float]]:
    """The run's own cut, if it fits, and others that may fit, or be faster; empty where none fits."""
    own = _own_cut(config)
    if limit_gb is None:
        return [own]
    if sum(most_blocks(config, limit_gb=limit_gb)) < config.model.layers:
        return []
    cuts = [own] if fits(config, own, limit_gb=limit_gb) else []
    if config.parallel.cut is None:
        cuts += [cut for cut in _other_cuts(config, costs, limit_gb=limit_gb) if cut != own]
    return cuts


def _own_cut(config: RunConfig) -> list[float]:
    return [cut.size for cut in cut_of(config) if cut.head_rows is None]


def layout_cuts(config: RunConfig, sizes: Sequence[float]) -> list[StageCut]:
    """The stages of a cut as in `parallel.cut`, with shards of the head behind them where there are any."""
    cuts = stage_cuts(sizes)
    if not config.parallel.shard_head:
        return cuts
    return with_head_shards(config, cuts)


def _other_cuts(config: RunConfig, costs: CostModel, *, limit_gb: float) -> Iterator[list[float]]:
    """Cuts besides the run's own that may fit, or be faster."""
    if not config.parallel.shard_head:
        yield from _fitting_cuts(config, costs, limit_gb=limit_gb)
    elif (stages := schedule_facts(config).stages) == config.parallel.stages:
        # Shards of the head even out what stages of about equal work differ by.
        context = config.data.context
        within = cut_model(config.model, stages=stages, context=context, within_blocks=True, has_head=False)
        yield [cut.size for cut in within]


def most_blocks(config: RunConfig, *, limit_gb: float) -> list[float]:
    """For each rank an upper bound of the blocks that it holds in `limit_gb`: of their weights, gradients and
    activations alone, which are as many times those of a block.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    run, size = represented(without_shards(config)), sizes(config)
    spec = describe(config.model)
    count = min(block.parameter_count for block in spec.blocks)
    whole, half = _of_a_block(_Settings(config))
    most = []
    for rank, moments in enumerate(run.course.moments):
        stages = [stage for stage, holder in enumerate(run.rank_of_stage) if holder == rank]
        versions = min(run.course.versions[stage] for stage in stages)
        activations = max(
            min(wholes * whole + halves * half for wholes, halves in moment.counts) for moment in moments
        )
        most.append(limit_gb * GB / (versions * count * size.replica + count * size.master + activations))
    return most


def fits(config: RunConfig, sizes: Sequence[float], *, limit_gb: float) -> bool:
    """Whether a run with so many blocks in each stage needs no more memory in any rank, 10^9 bytes."""
    held = [sum(kinds.values()) for kinds in _memory(config, sizes)]
    of_messages = Shape.of(config), _message_sizes(config)

    def have_room(messages: Sequence[int]) -> bool:
        return all(size + more <= limit_gb * GB for size, more in zip(held, messages, strict=True))

    # Messages are counted where that decides.
    return max(held) <= limit_gb * GB and (
        have_room(messages_at_most(*of_messages)) or have_room(messages(*of_messages))
    )


def _message_sizes(config: RunConfig) -> tuple[int, ...]:
    """Bytes of a message of each kind."""
    return tuple(message_bytes(config, kind) for kind in Kind)


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
    parts, ranks = costs.parts(config), config.parallel.stages
    microbatches, layers = config.schedule.microbatches, config.model.layers
    tied_shards = has_tied_shards(config)
    embedding, head = 0.0 if tied_shards else _least_work(parts.embedding), _least_work(parts.head)
    # Most of them are one and the same.
    kinds = {id(part): part for part in (*parts.blocks, *parts.halves)}
    work = {kind: _least_work(part) + _recomputing(config, part) for kind, part in kinds.items()}
    blocks, halves = ([work[id(part)] for part in of_kind] for of_kind in (parts.blocks, parts.halves))
    # Of a stage that begins with a block's first half, and of one that begins within a block.
    first_halves = min(halves[::2]), min(halves[1::2])
    block, half, chunks = min(blocks), min(halves), schedule_facts(config).stages // ranks
    schedule = schedules.find(config.schedule.name)
    split, in_a_v = _traits(schedule.name)
    split |= config.schedule.split
    head_rank = 0 if in_a_v else ranks - 1
    shards = config.parallel.shard_head
    # A shard can be as small as its rank has no room for more.
    whole_head = 0.0 if shards else head
    hidden = in_a_v and not schedule.synchronous
    of_embedding, of_half, of_block = (0.0,) * 3 if hidden else _least_reductions(config, costs)
    of_embedding *= not tied_shards
    message = 2 * costs.message(config) * (ranks > 1)
    trip = message * chunks * (ranks - 1) + sum(map(_recomputing, [config] * layers, parts.blocks))
    trip += sum(
        part.forward + (part.input_half if split else part.backward)
        for part in (
            *([] if tied_shards else [parts.embedding]),
            *parts.blocks,
            *([] if shards else [parts.head]),
        )
    )
    if shards:
        # The slowest of them has no fewer rows than the mean, and waits for two messages.
        trip += _shard_share(parts.head, 1 / ranks)[0] + message
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

    def enough(seconds: float) -> bool:
        total, before = 0, 0.0
        for rank in range(ranks):
            left = seconds - microbatches * ((rank == 0) * embedding + (rank == head_rank) * whole_head)
            count = most(left - before, microbatches * block, microbatches * half)
            # A rank's first stage has as many halves as its others, but for two.
            reducing = left - of_embedding * (rank == 0) + of_block * (chunks > 1)
            unhidden = microbatches * block + of_block / chunks, microbatches * half + of_half / chunks
            count = min(count, most(reducing, *unhidden), allowed[rank])
            if count < least[rank]:
                return False
            count = min(count, 2 * layers - total - sum(least[rank + 1 :]))
            total += count
            if fills:
                of_stage = count if chunks == 1 else max(1, count // chunks - 2)
                before += (rank == 0) * embedding + of_stage // 2 * block + of_stage % 2 * half + message
        return total >= 2 * layers

    def enough_within(seconds: float) -> bool:
        """`enough` for one stage per rank that nothing fills: a stage begins where the one before ends."""
        pair = min(block, sum(first_halves))

        def counts(left: float, reducing: float) -> list[int]:
            """Halves of a stage, by whether it begins within a block."""
            return [
                min(
                    most(left, microbatches * pair, microbatches * own),
                    most(reducing, microbatches * pair + of_block, microbatches * own + of_half),
                )
                for own in first_halves
            ]

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
    low = microbatches * (embedding + sum(blocks) + head) / ranks
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


def least_with_times(config: RunConfig, times: StageTimes) -> float:
    """A lower bound of the seconds of a step of a schedule of the family whose stages take so long: a rank
    does its work; and where a step ends before the next begins, it waits before that for the first forwards
    of the stages before it, and after that the last backwards are still to come, unless they are split."""
    member, microbatches = schedules.find(config.schedule.name), config.schedule.microbatches
    ranks, rank_of_stage = config.parallel.stages, represented(without_shards(config)).rank_of_stage
    split = _traits(member.name)[0] or config.schedule.split
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


def in_flight(config: RunConfig) -> int:
    """Most micro-batches in the first stage whose first backward has not begun.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    of_first = represented(without_shards(config)).course.in_flight[0]
    return max(wholes for wholes, _ in of_first) + FURTHER_AHEAD * config.parallel.shard_head


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


_ROUNDED = 1 + 1e-9
"""Sums of the same times in another order differ by less than this share."""


@cache
def _traits(name: str) -> tuple[bool, bool]:
    """Whether a schedule of the family splits backwards, and whether its last stage is on the first rank."""
    chunks = 2 if "chunks" in schedules.options_taken(name) else 1
    program = schedules.build(name, stages=2, microbatches=4, steps=1, chunks=chunks)
    return program.split_backward, program.rank_of_stage[-1] == 0


def losses(layout: Estimate, costs: CostModel) -> dict[str, float]:
    """Shares of the step, in 0..1: waiting for slower stages (`imbalance`), for messages and reductions
    (`network`), and else (`bubble`); and recomputation (`memory`)."""
    times = stage_times(layout.config, layout_cuts(layout.config, layout.cut), costs)
    unlinked = replace(times, message=0.0, reduction=(0.0,) * len(times.reduction))
    of_head, stages = ("head", "head_weight", "embed", "embed_weight"), len(layout.cut)
    kinds: dict[str, Any] = {
        name: times for name, times in vars(unlinked).items() if name not in ("message", *of_head)
    }
    equal: dict[str, Any] = {
        name: (*(sum(times[:stages]) / stages,) * stages, *times[stages:]) for name, times in kinds.items()
    }
    seconds = layout.step.seconds
    alone = step_with(layout.config, unlinked).seconds
    even = step_with(layout.config, replace(unlinked, **equal)).seconds
    network, imbalance = max(0.0, 1 - alone / seconds), max(0.0, (alone - even) / seconds)
    bubble = max(0.0, layout.step.bubble - network - imbalance)
    again = sum(_recomputing(layout.config, block) for block in costs.parts(layout.config).blocks)
    recomputing = layout.config.schedule.microbatches * again / layout.config.parallel.stages / seconds
    return {"bubble": bubble, "imbalance": imbalance, "network": network, "memory": recomputing}


def _with_cut(config: RunConfig, sizes: Sequence[float], step: StepTime) -> Estimate:
    run = represented(Shape.of(config))
    return Estimate(
        # Memory is counted later, when the caller may have changed its configuration.
        config=copy_of(config),
        cut=tuple(sizes),
        rank_of_stage=run.rank_of_stage,
        step=step,
        delay=run.delay,
    )


def step_of(config: RunConfig, sizes: Sequence[float], costs: CostModel) -> StepTime:
    """The step of a run with so many blocks in each stage.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    return step_with(config, stage_times(config, layout_cuts(config, sizes), costs))


def step_with(config: RunConfig, times: StageTimes) -> StepTime:
    """The step of a run whose stages take so long.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    if config.parallel.shard_gradients and schedule_facts(config).updates_together:
        # The next backward waits for the reduction, which therefore counts as an update. It is not work.
        updating = tuple(a + b for a, b in zip(times.update, times.reduction, strict=True))
        unhidden = replace(times, update=updating, reduction=(0.0,) * len(updating))
        step = _plain_step_time(config, unhidden)
        waiting = sum(times.reduction) / config.parallel.stages / step.seconds
        return replace(step, bubble=step.bubble + waiting)
    return _plain_step_time(config, times)


def _plain_step_time(config: RunConfig, times: StageTimes) -> StepTime:
    schedule, stages = config.schedule, len(times.forward)
    if schedules.is_custom(schedule.name):
        steps = steps_to_measure(stages=stages, microbatches=schedule.microbatches)
        program = segment_program(config, first_step=sync_steps(config), steps=steps + schedule.delay)
        return simulated_step(program, times)
    member = schedules.find(schedule.name)
    if config.parallel.shard_head and member.synchronous:
        return sharded_step(config, times)
    if config.parallel.shard_head or not (member.synchronous or member.unflushed):
        return unflushed_step(config, times)
    options = schedule_options(config)
    return step_time(
        schedule.name,
        times,
        microbatches=schedule.microbatches,
        update_interval=schedule.update_interval,
        chunks=stages // config.parallel.stages,
        ahead=options.get("ahead", 1),
        delay=options.get("delay"),
    )


def _fitting_cuts(config: RunConfig, costs: CostModel, *, limit_gb: float) -> Iterator[list[float]]:
    """Of the cuts that fit, the one whose slowest rank is fastest: first of whole blocks, if one fits; then
    where the first stage of each rank may begin or end within a block, and the last of all have no block, if
    that rank is faster by `WORTH_A_CUT`."""
    ranks, layers = config.parallel.stages, config.model.layers
    rank_of_stage = represented(without_shards(config)).rank_of_stage
    stages, parts = len(rank_of_stage), costs.parts(config)
    block_costs = [_whole(block) + _recomputing(config, block) for block in parts.blocks]
    half_costs = [_whole(half) + _recomputing(config, half) for half in parts.halves]
    ends = [(stage == 0) * _whole(parts.embedding) for stage in range(stages)]
    ends[-1] += _whole(parts.head)
    work_of = tuple(block_costs), tuple(half_costs), tuple(ends), rank_of_stage
    cost = _rank_work(*work_of, may_be_empty=False).stage_cost
    room = None if limit_gb == inf else _Room(config, limit_gb=limit_gb)

    def works_of(cut: Sequence[int]) -> list[float]:
        works, before = [0.0] * ranks, 0
        for stage, size in enumerate(cut):
            works[rank_of_stage[stage]] += cost(stage, size, before % 2 == 1)
            before += size
        return works

    def found(*, step: int, may_be_empty: bool = False, fast_enough: float = inf) -> Sequence[int] | None:
        # The fastest of all, or of those that fit without messages, is the fastest that fits, if it does.
        cut: Sequence[int] | None = _fastest_cut(*work_of, step, may_be_empty)
        if cut is None or max(works_of(cut)) > fast_enough:
            return None
        if room is None or room.has_all(cut, step=step):
            return cut

        def fits(sizes: Mapping[int, int], within: bool, *, held: Sequence[int]) -> bool:
            first = min(sizes)
            works = (cost(stage, size, within and stage == first) for stage, size in sizes.items())
            return sum(works) <= fast_enough and room.has(sizes, within, held)

        work = _rank_work(*work_of, may_be_empty=may_be_empty)
        search = partial(cut_over_ranks, items=2 * layers, work=work, step=step)
        cut = search(fits=partial(fits, held=[0] * ranks))
        if cut is None or room.has_all(cut, step=step):
            return cut
        return search(fits=partial(fits, held=messages(*room.of_messages)))

    whole, fast_enough = found(step=2), inf
    if whole is not None:
        yield [halves // 2 for halves in whole]
        work = works_of(whole)
        fast_enough = (1 - WORTH_A_CUT) * max(work)
        if sum(work) / ranks > fast_enough:
            return
    if rank_of_stage[:ranks] == tuple(range(ranks)):
        within = found(step=1, may_be_empty=True, fast_enough=fast_enough)
        if within is not None:
            yield [cut.size for cut in stage_cuts([halves / 2 for halves in within])]


class _Room:
    """Whether stages fit a memory: each part of it grows linearly with the blocks of a stage, up to its bound
    in `MOST`.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """

    def __init__(self, config: RunConfig, *, limit_gb: float) -> None:
        self.config, self.limit_gb = config, limit_gb
        self.run = represented(Shape.of(config))
        self.of_messages = Shape.of(config), _message_sizes(config)
        self.at_most = messages_at_most(*self.of_messages)
        stages = len(self.run.rank_of_stage)
        self.one_block, self.two_blocks = (self._held_by([size] * stages) for size in (1, 2))
        dense = config.model.dense_layers
        self.two_dense = self._held_by([2] * stages, dense=True) if dense else self.two_blocks

    def _held_by(self, sizes: Sequence[float], *, dense: bool = False) -> list[dict[str, int]]:
        return _parts(_alike(self.config, dense=dense), sizes)

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
        held = sum(_rank_memory(kept, self.run, rank).values())
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


Work = tuple[float, ...]
"""Seconds of each block, of each half of a block, or of what the ends of the model add to each stage."""


@lru_cache(maxsize=256)
def _rank_work(
    blocks: Work, halves: Work, ends: Work, rank_of_stage: tuple[int, ...], *, may_be_empty: bool
) -> RankWork:
    @cache
    def cost_of(first: bool, end: float, size: int, within: bool) -> float:
        return stage_cost(blocks, halves, int(not first), size, within=within) + end

    return RankWork(
        rank_of_stage,
        lambda stage, size, within: cost_of(stage == 0, ends[stage], size, within),
        together=2,
        may_be_empty=may_be_empty,
        alike=lambda stage: (stage == 0, ends[stage]),
    )


@lru_cache(maxsize=1024)
def _fastest_cut(
    blocks: Work, halves: Work, ends: Work, rank_of_stage: tuple[int, ...], step: int, may_be_empty: bool
) -> tuple[int, ...] | None:
    """Halves of blocks in each stage where everything fits."""
    work = _rank_work(blocks, halves, ends, rank_of_stage, may_be_empty=may_be_empty)
    cut = cut_over_ranks(items=2 * len(blocks), work=work, fits=None, step=step)
    return None if cut is None else tuple(cut)


def _alike(config: RunConfig, *, dense: bool) -> RunConfig:
    """The same model with all of its blocks dense, or none of them that may have experts, and as many as any
    hypothetical cut has."""
    alike = copy_of(config)
    layers = 2 * len(cut_of(config))
    alike.model.dense_layers, alike.model.layers = (
        layers if dense else 0,
        layers if config.model.experts else 4,
    )
    return alike


def planned_memory(config: RunConfig, sizes: Sequence[float] | None = None) -> list[dict[str, int]]:
    """Bytes of each rank by kind, as in `Estimate.memory`; `sizes`: of the stages, if not the run's own."""
    held = messages(Shape.of(config), _message_sizes(config))
    return [
        kinds | {"messages": of_rank}
        for kinds, of_rank in zip(_memory(config, sizes or _own_cut(config)), held, strict=True)
    ]


def _memory(config: RunConfig, sizes: Sequence[float]) -> list[dict[str, int]]:
    """Bytes that each rank holds when it holds most, by kind; `messages` are 0."""
    parts = _parts(config, sizes)
    run = represented(Shape.of(config))
    held = []
    for rank in range(config.parallel.stages):
        stages = [stage for stage, holder in enumerate(run.rank_of_stage) if holder == rank]
        kinds = _rank_memory({stage: parts[stage] for stage in stages}, run, rank)
        held.append({kind: round(size) for kind, size in kinds.items()})
    return held


def _rank_memory(parts: Mapping[int, Mapping[str, float]], run: Represented, rank: int) -> dict[str, float]:
    """Bytes of a rank by kind, from the parts of its stages, ascending, as `_parts` has them."""
    fullest, most = dict.fromkeys(("activations", "recomputed", "temporary"), 0.0), (0.0, 0.0, 0.0)
    beside = 0.0
    if any(run.buffers[stage] > 1 for stage in parts):
        # Updates run beside the actions, one at a time, on a stream with memory of its own.
        beside = max(of_stage["update"] for of_stage in parts.values())
    slots = {stage: max(map(sum, run.course.in_flight[stage])) for stage in parts}
    pools = sum(slots[stage] * of_stage["slot"] for stage, of_stage in parts.items())
    for op, stage, counts in run.course.moments[rank]:
        if pools:
            # CUDA graphs keep the memory of every micro-batch in flight, also while there are fewer.
            counts = tuple((slots[stage], 0) for stage in parts)
        activations = sum(
            wholes * of_stage["whole"] + halves * of_stage["half"]
            for (wholes, halves), of_stage in zip(counts, parts.values(), strict=True)
        )
        recomputed = parts[stage]["recomputed"] if op is Op.BACKWARD else 0.0
        within = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.UPDATE: "update"}[op]
        temporary = pools + (beside if op is Op.UPDATE and beside else parts[stage][within] + beside)
        # Of equal ones always the same: moments come in any order.
        held = activations + recomputed + temporary, activations, recomputed
        if held > most:
            most = held
            fullest = {"activations": activations, "recomputed": recomputed, "temporary": temporary}
    kinds = {kind: sum(of_stage[kind] for of_stage in parts.values()) for kind in _LASTING}
    return kinds | fullest | {"allocator": allocator_bytes(sum(fullest.values()))}


_LASTING = (
    *("weights", "master", "gradients", "optimizer", "correction"),
    *("messages", "reduction", "communicators"),
)


def _parts(config: RunConfig, sizes: Sequence[float]) -> list[dict[str, int]]:
    """Bytes of each stage: by kind what lasts, `whole` and `half` of a micro-batch in flight, and what a
    forward, a backward and an update take for themselves. Its first stage has what a rank needs once."""
    run = represented(Shape.of(config))
    settings, cuts, rank_of_stage = _Settings(config), _alike_cuts(config, sizes), run.rank_of_stage
    parts: list[dict[str, int]] = []
    for stage, cut in enumerate(cuts):
        rank = rank_of_stage[stage]
        of_rank = dict.fromkeys(("messages", "reduction", "communicators"), 0)
        if rank not in rank_of_stage[:stage]:
            held = frozenset(cut for cut, holder in zip(cuts, rank_of_stage, strict=True) if holder == rank)
            of_rank["reduction"] = _reduction_bytes(settings, held)
            of_rank["communicators"] = _communicators(config, rank, rank_of_stage)
        facts = run.course.versions[stage], run.course.mismatch[stage], run.buffers[stage]
        parts.append(
            _lasting(settings, cut, *facts)
            | of_rank
            | _of_an_action(settings, cut, run.course.mismatch[stage] > 0)
        )
    return parts


def _alike_cuts(config: RunConfig, sizes: Sequence[float]) -> list[StageCut]:
    """For each stage, one with as many halves of each kind and the same ends of the model: without experts
    the one that begins as early as it can, so that it is the same in many layouts."""
    cuts = first_alike(config.model, layout_cuts(config, sizes))
    if config.model.experts:
        return cuts
    return [
        replace(cut, halves=range(cut.halves.start % 2, cut.halves.start % 2 + len(cut.halves)))
        for cut in cuts
    ]


class _Settings:
    """A configuration as key of a cache: equal to others that differ in schedule, stages and cut alone."""

    _GEOMETRY = ("stages", "cut", "shard_head")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        own = (config.model, config.data, config.train, config.error_feedback, config.correction, config.site)
        values = [value for section in (*own, config.optimizer) for value in vars(section).values()]
        self._key = (
            *(repr(value) if isinstance(value, dict | list) else value for value in values),
            *(value for name, value in vars(config.parallel).items() if name not in self._GEOMETRY),
        )
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._key == other._key


_remembered = lru_cache(maxsize=4096)


@_remembered
def _of_a_block(settings: _Settings) -> tuple[int, int]:
    """Bytes of a micro-batch in flight in a block, and of a half, at least."""
    model = settings.config.model
    halves = [range(2 * block, 2 * block + 2) for block in range(model.layers)]
    cuts = first_alike(
        model, [StageCut(halves=of_block, has_embedding=False, has_head=False) for of_block in halves]
    )
    whole, half = zip(*(microbatch_activations(settings.config, cut) for cut in set(cuts)), strict=True)
    return min(whole), min(half)


@_remembered
def _reduction_bytes(settings: _Settings, cuts: frozenset[StageCut]) -> int:
    return reduction_bytes(settings.config, list(cuts))


@_remembered
def _lasting(settings: _Settings, cut: StageCut, *facts: int) -> dict[str, int]:
    return lasting_bytes(settings.config, cut, *facts)


@_remembered
def _of_an_action(settings: _Settings, cut: StageCut, mismatched: bool) -> dict[str, int]:
    """Bytes of a micro-batch in flight, and temporaries of the actions."""
    config = settings.config
    owned = owned_members(stage_parameters(config.model, cut), data_ranks=config.parallel.data)
    whole, half = microbatch_activations(config, cut)
    return {
        "whole": whole,
        "half": half,
        "forward": forward_bytes(config, cut),
        "backward": backward_bytes(config, cut, mismatched=mismatched),
        "slot": slot_bytes(config, cut),
        "update": max(update_bytes(config, of_rank, mismatched=mismatched) for of_rank in owned),
    }


def _communicators(config: RunConfig, rank: int, rank_of_stage: Sequence[int]) -> int:
    if config.parallel.shard_head:
        shards = config.parallel.stages
        tied_shards = has_tied_shards(config)
        channels = channels_between_ranks(rank_of_stage, head_shards=shards, tied_shards=tied_shards)
        neighbours = sum(rank in (sender, receiver) for sender, receiver, _ in channels) // 2
    else:
        neighbours = len({pair for pair in pairwise(rank_of_stage) if rank in pair and pair[0] != pair[1]})
    return communicator_bytes(neighbours=neighbours, stages=config.parallel.stages, data=config.parallel.data)


def stage_times(config: RunConfig, cuts: list[StageCut], costs: CostModel) -> StageTimes:
    """Times of the stages of a cut."""
    parts = costs.parts(config)
    forward: list[float] = []
    backward: list[float] = []
    input_half: list[float] = []
    weight_half: list[float] = []
    update: list[float] = []
    reduction: list[float] = []
    head: list[float] = []
    head_weight: list[float] = []
    # A look-up writes as much whatever rows a shard has.
    tied_shards = [cut.head_rows is not None for cut in cuts] if has_tied_shards(config) else []
    times: dict[StageCut, tuple[float, ...]] = {}
    for cut in first_alike(config.model, cuts):
        if cut not in times:
            times[cut] = _times_of(config, cut, parts, costs)
        for of_stages, seconds in zip(
            (forward, backward, input_half, weight_half, update, reduction, head, head_weight),
            times[cut],
            strict=True,
        ):
            of_stages.append(seconds)
    return StageTimes(
        forward=tuple(forward),
        backward=tuple(backward),
        input_half=tuple(input_half),
        weight_half=tuple(weight_half),
        update=tuple(update),
        reduction=tuple(reduction),
        head=tuple(head) if config.parallel.shard_head else (),
        head_weight=tuple(head_weight) if config.parallel.shard_head else (),
        embed=tuple(parts.embedding.forward * is_shard for is_shard in tied_shards),
        embed_weight=tuple(parts.embedding.backward * is_shard for is_shard in tied_shards),
        message=costs.message(config),
    )


def _times_of(config: RunConfig, cut: StageCut, parts: ModelTimes, costs: CostModel) -> tuple[float, ...]:
    """Forward, backward, its halves, update and reduction of a stage, and of a shard of the head its two
    actions, seconds."""
    blocks = [parts.piece(halves) for halves in cut.pieces]
    contents = (
        blocks
        + [parts.embedding] * (cut.has_embedding and cut.head_rows is None)
        + [parts.head] * cut.has_head
    )
    recomputed = sum(_recomputing(config, block) for block in blocks)
    parameters = stage_parameters(config.model, cut)
    owned = owned_members(parameters, data_ranks=config.parallel.data)
    return (
        sum(part.forward for part in contents),
        sum(part.backward for part in contents) + recomputed,
        sum(part.input_half for part in contents) + recomputed,
        sum(part.weight_half for part in contents),
        costs.update(config, owned[0]),
        costs.reduction(config, sum(parameter.size for parameter in parameters)),
        *_shard_times(config, cut, parts.head),
    )


def _shard_times(config: RunConfig, cut: StageCut, head: PartTimes) -> tuple[float, float]:
    """Of a shard of the head: the logits with the gradient of its input, and the gradient of its weights;
    (0, 0) for other stages."""
    if cut.head_rows is None:
        return 0.0, 0.0
    return _shard_share(head, len(cut.head_rows) / config.model.vocab_size)


def _shard_share(head: PartTimes, share: float) -> tuple[float, float]:
    """The two actions of a shard with this share of the head's rows, seconds.

    Where the whole head is computed in chunks, its forward has all three products.
    """
    weights = head.weight_half or _whole(head) / 3
    return (_whole(head) - weights) * share, weights * share


def _recomputing(config: RunConfig, block: PartTimes) -> float:
    """Seconds that recomputation adds to a block's backward."""
    return {"none": 0.0, "selective": block.cheap, "full": block.forward}[config.train.recompute]


def _whole(part: PartTimes) -> float:
    return part.forward + part.backward


def _least_work(part: PartTimes) -> float:
    return part.forward + min(part.backward, part.input_half + part.weight_half)
