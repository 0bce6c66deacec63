"""Ranks layouts, best first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from math import inf

import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.progress import shown
from asyncpp_cli.planner.bounds import in_flight, least_seconds, least_with_times, most_blocks
from asyncpp_cli.planner.cuts import times_if_all_fits
from asyncpp_cli.planner.estimate import Estimate, estimate, fitting, own_estimate, step_with
from asyncpp_cli.planner.layouts import layouts
from asyncpp_cli.planner.planned_memory import fits, needs_too_many_queues
from asyncpp_cli.planner.representative import Shape, is_tieable, represented
from asyncpp_cli.planner.stage_times import CostModel
from asyncpp_cli.planner.step_time import StepTime
from stages.config.run_config import RunConfig
from stages.resolve.schedule import can_tie

_MARGIN = 0.99
"""A simulated step seems shorter than its work by less than this, where ranks end at different times."""


def ranked(
    base: RunConfig,
    *,
    gpus: int,
    tokens_per_step: int,
    names: Collection[str],
    costs: CostModel,
    limit_gb: float,
    wanted: Callable[[RunConfig], bool] = lambda config: True,
    all_of_them: bool = False,
) -> Iterator[Estimate]:
    """Estimates of every possible layout: those that fit first, then by step time, delay and memory. `wanted`
    is that of `best_first`; `all_of_them`: every one will be asked for, which then takes less time.

    Raises:
        UserError: no layout is possible.
    """
    configs = layouts(base, gpus=gpus, tokens_per_step=tokens_per_step, names=names)
    with shown("comparing layouts"):  # the others take a fraction of the first one's time
        if all_of_them:
            estimates = iter(all_in_order(configs, costs=costs, limit_gb=limit_gb))
        else:
            estimates = best_first(configs, costs=costs, limit_gb=limit_gb, wanted=wanted)
        first = next(estimates, None)
    if first is None and base.model.tied:
        raise UserError(
            f"model.tied: no layout of {', '.join(names)} has embedding and head on one rank; accepted: "
            f"false, or --schedule {can_tie()[0]}, or one with shards of both, such as 2bw"
        )
    return iter(()) if first is None else chain([first], estimates)


def best_first(
    configs: Iterable[RunConfig],
    *,
    costs: CostModel,
    limit_gb: float,
    wanted: Callable[[RunConfig], bool] = lambda config: True,
    fitting_only: bool = False,
) -> Iterator[Estimate]:
    """Estimates of those layouts that are possible, in the order of `ranked`.

    A layout is estimated when no other may come before it, as the work alone takes as long as the best. So
    the first few take a fraction of the time of all.

    Args:
        configs: the layouts.
        costs: of the model's parts.
        limit_gb: memory of a GPU, 10^9 bytes.
        wanted: asked before each closer look at a layout, which is left out if it is not wanted.
        fitting_only: end before the first layout that does not fit.
    """
    # Of each layout: whether it exceeds the memory; seconds, at least; delay; memory; number.
    queue: list[tuple[bool, float, int, _Memory, int]] = []
    known: dict[int, Estimate] = {}
    numbered = list(configs)
    places = [_places(config, costs, limit_gb=limit_gb) for config in numbered]

    def look_closer(number: int) -> None:
        for exceeds, seconds, layout in islice(places[number], 1):
            delay = -1
            if layout is not None:
                known[number], delay = layout, layout.delay
            heapq.heappush(queue, (exceeds, seconds, delay, _Memory(layout), number))

    for number in range(len(places)):
        look_closer(number)
    while queue:
        exceeds, _, _, _, number = heapq.heappop(queue)
        if exceeds and fitting_only:
            return
        if number in known:
            yield known.pop(number)
        elif wanted(numbered[number]):
            look_closer(number)


def _places(
    config: RunConfig, costs: CostModel, *, limit_gb: float
) -> Iterator[tuple[bool, float, Estimate | None]]:
    """Where a layout comes: whether it exceeds the memory, and its seconds. First bounds, each closer than
    the one before it, and taking longer to compute; then its estimate."""
    least = _MARGIN * least_seconds(config, costs)
    yield False, least, None
    try:
        if not _possible(config):
            return
        held = most_blocks(config, limit_gb=limit_gb)
        later = _MARGIN * least_seconds(config, costs, in_flight=in_flight(config), most_blocks=held)
        if sum(held) >= config.model.layers and later < inf:
            yield False, max(least, later), None
            times = times_if_all_fits(config, costs)
            bounds = {cut: least_with_times(config, each) for cut, each in times.items()}
            timed: dict[tuple[float, ...], StepTime] = {}
            if shards := config.parallel.shard_head:
                # Memory forces no other cut.
                least = max(least, later, _MARGIN * min(bounds.values()))
                yield False, least, None
            # A cut that memory forces may be faster: what is slower is the rank with most work.
            if shards or all(fits(config, cut, limit_gb=limit_gb) for cut in times):
                least = max(least, _MARGIN * min(bounds.values()))
                yield False, max(least, later), None
                fastest = inf
                for cut in sorted(bounds, key=bounds.__getitem__):
                    if bounds[cut] < fastest:
                        timed[cut] = step_with(config, times[cut])
                        fastest = min(fastest, timed[cut].seconds)
                least = max(least, _MARGIN * fastest)
                yield False, max(least, later), None
            layout = fitting(config, costs, limit_gb=limit_gb, timed=timed)
            if layout is not None:
                yield layout.exceeds(limit_gb), layout.step.seconds, layout
                return
        yield True, least, None
        layout = own_estimate(config, costs)
        yield layout.exceeds(limit_gb), layout.step.seconds, layout
    except schedules.ScheduleError:
        return


def all_in_order(configs: Iterable[RunConfig], *, costs: CostModel, limit_gb: float) -> list[Estimate]:
    """All that `best_first` yields, in its order: each is estimated, so no bounds are computed."""
    found = []
    for config in configs:
        with suppress(schedules.ScheduleError):
            if _possible(config):
                found.append(estimate(config, costs, limit_gb=limit_gb))
    return sorted(found, key=lambda one: (one.exceeds(limit_gb), one.step.seconds, one.delay, one.memory_gb))


class _Memory:
    """Memory of a layout, computed where two of them are compared."""

    def __init__(self, layout: Estimate | None = None) -> None:
        self._layout = layout

    @property
    def _gb(self) -> float:
        return 0.0 if self._layout is None else self._layout.memory_gb

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Memory) and self._gb == other._gb

    def __lt__(self, other: _Memory) -> bool:
        return self._gb < other._gb


def _possible(config: RunConfig) -> bool:
    if needs_too_many_queues(config, represented(Shape.of(config)).rank_of_stage):
        return False
    return not config.model.tied or config.parallel.shard_head or is_tieable(Shape.of(config))
