"""Ranks layouts, best first."""

from __future__ import annotations

from collections.abc import Collection

import schedules
from asyncpp_cli.errors import UserError
from asyncpp_cli.planner.estimate import CostModel, Estimate, estimate
from asyncpp_cli.planner.layouts import layouts
from asyncpp_cli.planner.representative import Shape, represented
from stages.config import RunConfig
from stages.schedule_validation import IN_A_V


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
            if config.model.tied and not represented(Shape.of(config)).can_tie:
                continue
            estimates.append(estimate(config, costs, limit_gb=limit_gb))
        except schedules.ScheduleError:
            continue
    if base.model.tied and not estimates:
        raise UserError(
            f"model.tied: no layout of {', '.join(names)} has embedding and head on one rank; accepted: "
            f"false, or --schedule {IN_A_V[0]}"
        )
    return sorted(estimates, key=lambda layout: order(layout, limit_gb=limit_gb))


def order(layout: Estimate, *, limit_gb: float) -> tuple[bool, float, int, float]:
    """Key to sort layouts by, best first: those that fit, then by step time, delay and memory."""
    return layout.memory_gb > limit_gb, layout.step.seconds, layout.delay, layout.memory_gb
