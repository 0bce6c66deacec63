"""Ranks layouts, best first."""

from __future__ import annotations

from collections.abc import Collection

import schedules
from asyncpp_cli.planner.estimate import CostModel, Estimate, estimate
from asyncpp_cli.planner.layouts import layouts
from stages.config import RunConfig


def ranked(
    base: RunConfig,
    *,
    gpus: int,
    tokens_per_step: int,
    names: Collection[str],
    costs: CostModel,
    limit_gb: float,
) -> list[Estimate]:
    """Estimates of every possible layout: those that fit first, then by step time, delay and memory.

    Raises:
        UserError: no layout is possible.
    """
    estimates = []
    for config in layouts(base, gpus=gpus, tokens_per_step=tokens_per_step, names=names):
        try:
            estimates.append(estimate(config, costs, limit_gb=limit_gb))
        except schedules.ScheduleError:
            continue
    return sorted(
        estimates,
        key=lambda layout: (
            layout.memory_gb > limit_gb,
            layout.step.seconds,
            layout.delay,
            layout.memory_gb,
        ),
    )
