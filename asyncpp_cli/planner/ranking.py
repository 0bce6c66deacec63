"""Ranks layouts, best first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

import schedules
from asyncpp_cli.errors import UserError
from asyncpp_cli.planner.estimate import CostModel, Estimate, fitting, least_seconds, own_estimate
from asyncpp_cli.planner.layouts import layouts
from asyncpp_cli.planner.representative import Shape, represented
from stages.config import RunConfig
from stages.schedule_validation import can_tie

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
) -> Iterator[Estimate]:
    """Estimates of every possible layout: those that fit first, then by step time, delay and memory.

    Raises:
        UserError: no layout is possible.
    """
    configs = layouts(base, gpus=gpus, tokens_per_step=tokens_per_step, names=names)
    estimates = best_first(configs, costs=costs, limit_gb=limit_gb)
    first = next(estimates, None)
    if first is None and base.model.tied:
        raise UserError(
            f"model.tied: no layout of {', '.join(names)} has embedding and head on one rank; accepted: "
            f"false, or --schedule {can_tie()[0]}"
        )
    return iter(()) if first is None else chain([first], estimates)


def best_first(
    configs: Iterable[RunConfig],
    *,
    costs: CostModel,
    limit_gb: float,
    wanted: Callable[[RunConfig], bool] = lambda config: True,
) -> Iterator[Estimate]:
    """Estimates of those layouts that are possible, in the order of `ranked`.

    A layout is estimated when no other may come before it, as the work alone takes as long as the best. So
    the first few take a fraction of the time of all.

    Args:
        configs: the layouts.
        costs: of the model's parts.
        limit_gb: memory of a GPU, 10^9 bytes.
        wanted: asked just before a layout is estimated, which is left out if it is not wanted.
    """
    # Keys begin with: whether the layout exceeds the memory; seconds, at least; delay; memory; number.
    queue: list[tuple[bool, float, int, float, int]] = []
    known: dict[int, Estimate] = {}
    numbered = list(configs)
    for number, config in enumerate(numbered):
        queue.append((False, _MARGIN * least_seconds(config, costs), -1, 0.0, number))
    heapq.heapify(queue)
    while queue:
        exceeds, least, _, _, number = heapq.heappop(queue)
        if number in known:
            yield known.pop(number)
            continue
        config = numbered[number]
        try:
            if not exceeds and (not _possible(config) or not wanted(config)):
                continue
            layout = own_estimate(config, costs) if exceeds else fitting(config, costs, limit_gb=limit_gb)
        except schedules.ScheduleError:
            continue
        if layout is None:
            heapq.heappush(queue, (True, least, -1, 0.0, number))
            continue
        known[number] = layout
        key = (layout.memory_gb > limit_gb, layout.step.seconds, layout.delay, layout.memory_gb, number)
        heapq.heappush(queue, key)


def _possible(config: RunConfig) -> bool:
    return not config.model.tied or represented(Shape.of(config)).can_tie
