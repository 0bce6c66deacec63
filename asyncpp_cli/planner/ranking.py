"""Layouts, best first."""

from __future__ import annotations

from collections.abc import Collection

import schedules
from asyncpp_cli.planner.estimate import Costs, Estimate, estimate
from asyncpp_cli.planner.layouts import layouts
from stages.config import RunConfig


def ranked(
    base: RunConfig,
    *,
    gpus: int,
    tokens_per_step: int,
    names: Collection[str],
    costs: Costs,
    limit_gb: float,
) -> list[Estimate]:
    """Every layout that the schedules allow: those that fit first, then by step time, delay and memory.

    Raises:
        UserError: there is none.
    """
    found = []
    for config in layouts(base, gpus=gpus, tokens_per_step=tokens_per_step, names=names):
        try:
            found.append(estimate(config, costs, limit_gb=limit_gb))
        except schedules.ScheduleError:
            continue
    return sorted(
        found,
        key=lambda one: (one.memory_gb > limit_gb, one.step.seconds, one.delay, one.memory_gb),
    )
