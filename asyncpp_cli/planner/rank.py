"""Ranks layouts of a run, best first."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate, islice
from math import inf
from operator import truediv

import schedules
from asyncpp_cli.planner.costs.roofline import PartTimes
from asyncpp_cli.planner.cuts import WORTH_A_CUT, cuts_to_try
from asyncpp_cli.planner.estimate import Estimate, best_of, least_with, own_estimate
from asyncpp_cli.planner.layouts import layouts
from asyncpp_cli.planner.memory import GB, BlocksMemory, RankMemory
from asyncpp_cli.planner.shared import Shared, recomputing, settings_of
from asyncpp_cli.planner.stage_times import StageTimes
from stages.config.run_config import RunConfig
from stages.config.segments import has_tied_shards, schedule_facts, schedule_options, update_interval
from stages.memory.estimate import lasting_bytes, microbatch_activations, updated_bytes
from stages.shape.families import describe
from stages.shape.partition import StageCut

_ROUNDED = 1 - 1e-9
"""Sums of the same times in another order differ by less than this share."""


def best_first(
    base: RunConfig,
    shared: Shared,
    *,
    gpus: int,
    tokens_per_step: int,
    names: Collection[str],
    limit_gb: float,
    wanted: Callable[[RunConfig], bool] = lambda config: True,
) -> Iterator[Estimate]:
    """Estimates of the layouts that are possible: those that fit first, then by step time, delay and memory.

    A layout is estimated once no other may come before it, by a lower bound of its time: the first few take a
    fraction of the time of all.

    Args:
        base: the run.
        shared: with the costs of its parts.
        gpus: ranks.
        tokens_per_step: of all ranks.
        names: schedules to consider.
        limit_gb: memory of a GPU, 10^9 bytes.
        wanted: asked before a layout is looked at closely; one that is not wanted is left out.

    Raises:
        UserError: there is no such layout.
    """
    # For each layout: whether it exceeds the memory; seconds, at least; delay; memory; and its number.
    queue: list[tuple[bool, float, int, _Memory, int]] = []
    known: dict[int, Estimate] = {}
    asked = layouts(base, gpus=gpus, tokens_per_step=tokens_per_step, names=names)
    configs = list(map(shared.placed, asked))
    places = [_places(config, shared, limit_gb=limit_gb) for config in configs]

    def look_closer(number: int) -> None:
        for exceeds, least, layout in islice(places[number], 1):
            delay, memory = -1, _Memory(layout)
            if layout is not None:
                known[number], delay = layout, layout.delay
            heapq.heappush(queue, (exceeds, least, delay, memory, number))

    for number in range(len(places)):
        look_closer(number)
    while queue:
        *_, number = heapq.heappop(queue)
        if number in known:
            yield known.pop(number)
        elif wanted(configs[number]):
            look_closer(number)


def _places(
    config: RunConfig, shared: Shared, *, limit_gb: float
) -> Iterator[tuple[bool, float, Estimate | None]]:
    """Where a layout comes: whether it exceeds the memory, and its seconds. First lower bounds, each closer
    than the one before, and taking longer to compute; then its estimate. Nothing if it is not possible."""
    least = _ROUNDED * least_seconds(config, shared)
    yield False, least, None
    # A cut that memory asks for may be faster than these by as much as a cut has to save to be taken. With
    # shards of the head there are no others.
    loose = _ROUNDED * (1 if config.parallel.shard_head else 1 - WORTH_A_CUT)
    times = [shared.times(config, cut) for cut in cuts_to_try(config, shared, limit_gb=inf)]
    for bound in (least_with, least_in_pace):
        least = max(least, loose * min(bound(config, shared, each) for each in times))
        yield False, least, None
    try:
        if exceeds := not _may_fit(config, shared, limit_gb=limit_gb):
            yield True, least, None
        memory = RankMemory(config, shared)
        if memory.needs_too_many_queues or (config.model.tied and not memory.program.is_tieable):
            return
        cuts = [] if exceeds else cuts_to_try(config, shared, limit_gb=limit_gb)
        if cuts:
            times = [shared.times(config, cut) for cut in cuts]
            for bound in (least_with, least_in_pace, _least_in_program):
                least = max(least, _ROUNDED * min(bound(config, shared, each) for each in times))
                yield False, least, None
            found = best_of(cuts, config, shared)
            yield False, found.step.seconds, found
            return
        if not exceeds:
            yield True, least, None
        found = own_estimate(config, shared)
        yield True, found.step.seconds, found
    except schedules.ScheduleError:
        return


def least_in_pace(config: RunConfig, shared: Shared, times: StageTimes) -> float:
    """A lower bound of the seconds of a step that is never flushed, whose stages take so long."""
    if schedule_facts(config).synchronous:
        return 0.0
    return config.schedule.microbatches * shared.pace(config).seconds(times)


def _least_in_program(config: RunConfig, shared: Shared, times: StageTimes) -> float:
    """A lower bound from the cycle that was longest where stages took other times."""
    return shared.program(config).least_seconds(times)


class _Memory:
    """Memory of an estimated layout, counted where two of them are compared."""

    def __init__(self, layout: Estimate | None = None) -> None:
        self._layout = layout

    @property
    def _gb(self) -> float:
        return 0.0 if self._layout is None else self._layout.memory_gb

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Memory) and self._gb == other._gb

    def __lt__(self, other: _Memory) -> bool:
        return self._gb < other._gb


def least_delay(config: RunConfig) -> int:
    """The delay of a layout, or one where only its program tells how much more it is."""
    return 0 if schedule_facts(config).synchronous else schedule_options(config).get("delay", 1)


def least_seconds(config: RunConfig, shared: Shared) -> float:
    """A lower bound of the seconds of a step under any cut: what the fullest rank does.

    It performs all micro-batches of its blocks. In a step that is flushed it waits for a forward of the
    stages before it, and with whole backwards these end as much later than its own.
    """
    facts, ranks = schedule_facts(config), config.parallel.stages
    chunks = facts.stages // ranks
    splits = ranks > 1 and shared.nature(config).splits
    interval = 0 if facts.updates_together else update_interval(config)
    microbatches = config.schedule.microbatches
    kind = chunks, facts.synchronous, splits, facts.updates_together, interval, config.parallel.shard_head
    return shared.once(
        ("least", *kind, microbatches, *settings_of(config)),
        lambda: _least(config, shared, chunks=chunks, splits=splits),
    )


def _least(config: RunConfig, shared: Shared, *, chunks: int, splits: bool) -> float:
    parts, spec, facts = shared.parts(config), describe(config.model), schedule_facts(config)
    ranks, microbatches = config.parallel.stages, config.schedule.microbatches
    tied, sharded = has_tied_shards(config), config.parallel.shard_head
    embedding, head = 0.0 if tied else _work(parts.embedding), _work(parts.head)
    key = ("halves", config.train.microbatch_size, config.train.recompute, ranks * config.parallel.data)
    works = shared.once(key, lambda: [_work(half) + recomputing(config, half) for half in parts.halves])
    halves = [microbatches * work for work in works]
    counts = shared.once(("values",), lambda: [half.parameter_count for half in spec.halves])
    first = 0.0
    if config.parallel.data > 1 and not facts.updates_together and chunks == 1:
        # A stage waits for its own updates; a rank of several stages does the others' work meanwhile.
        updates = microbatches / update_interval(config)
        reductions = {count: shared.costs.reduction(config, count) for count in set(counts)}
        halves = [work + updates * reductions[count] for work, count in zip(halves, counts, strict=True)]
    elif config.parallel.data > 1 and facts.synchronous:
        beside = 0 if tied or splits else spec.embedding.parameter_count
        first = shared.costs.reduction(config, min(counts) + beside)
    halves[0] += microbatches * embedding
    last = 0.0 if sharded else microbatches * head
    mean = (sum(halves) + microbatches * head) / ranks
    # Weight halves, and gradients of shards, may come while a rank waits at the end.
    whole = not splits and (chunks == 1 or not sharded)
    waits = [work if whole else half.forward for half, work in zip(parts.halves, works, strict=True)]
    if chunks > 1:
        # A rank has at least so many halves; those before it have one each in the first of their stages.
        most = -(-len(halves) // ranks)
        filled = facts.synchronous * (ranks - 1) / 2 * min(waits)
        return first + max(mean + filled, most * min(halves[1:]), last + chunks * min(halves[1:]))
    fill = facts.synchronous * min(map(truediv, waits, works)) / microbatches
    return first + max(mean, _packed(halves, last, ranks=ranks, fill=fill))


def _packed(items: list[float], last: float, *, ranks: int, fill: float) -> float:
    """The least seconds in which `ranks` ranks do consecutive items, the last of them `last`, too, where each
    first waits for `fill` of what the ranks before it do."""
    ends = [0.0, *accumulate(items)]
    total = ends[-1] + last

    def is_enough(seconds: float) -> bool:
        done, place = 0.0, 0
        for _ in range(ranks - 1):
            place = bisect_right(ends, done + (seconds - fill * done) * (1 + 1e-12)) - 1
            done = ends[place]
        return total - done <= seconds - fill * done

    low, high = total / ranks, total
    while high > 1.0001 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low


def _may_fit(config: RunConfig, shared: Shared, *, limit_gb: float) -> bool:
    """Whether a layout may fit, by what is known before its program is built."""
    if _least_gb(config, shared) > limit_gb:
        return False
    if schedule_facts(config).synchronous:
        return True
    # It is the same for any number of micro-batches and any delay.
    pace = shared.pace(config)
    key = ("may fit", pace.shape, *settings_of(config), limit_gb)
    return shared.once(key, lambda: BlocksMemory(config, shared, pace).may_fit(limit_gb=limit_gb))


def _least_gb(config: RunConfig, shared: Shared) -> float:
    """A lower bound of the memory of the fullest rank, 10^9 bytes: the mean over the ranks of weights,
    gradients and one micro-batch's activations, without the head."""

    def found() -> float:
        cut = StageCut(halves=range(2 * config.model.layers), has_embedding=False, has_head=False)
        updated = updated_bytes(config, cut, mismatch=0)
        lasting = lasting_bytes(config, cut, updated, versions=1, gradient_buffers=1)
        held = lasting["weights"] + lasting["gradients"] + microbatch_activations(config, cut)[0]
        return held / GB

    key = ("least memory", config.train.microbatch_size, config.train.recompute)
    return shared.once(key, found) / config.parallel.stages


def _work(part: PartTimes) -> float:
    """Seconds of a micro-batch in a part, with the cheaper kind of backward."""
    return part.forward + min(part.backward, part.input_half + part.weight_half)
