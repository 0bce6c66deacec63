"""The verdicts of a report at the speed that is planned for another run.

A module of its own, so that only a report that plans imports the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.cells import DEFAULT_GPU, planned_machine
from asyncpp_cli.planner.layouts import CONSIDERED
from asyncpp_cli.planner.listing import KINDS, Layout, listed
from asyncpp_cli.planner.shared import Shared
from asyncpp_cli.report.analysis.transfer import Target, Transfer
from asyncpp_cli.report.analysis.verdict import Verdict


def transfers(found: Sequence[Verdict], target: Target) -> list[Transfer]:
    """The verdicts on arms at a delay of 1, each with the speed that is planned for the target.

    Raises:
        UserError: there is no such model or device, or no layout of so many GPUs and tokens.
    """

    carried = []
    plans: dict[tuple[str, tuple[str, ...]], tuple[Target, Layout | None, Layout | None]] = {}
    for verdict in found:
        if verdict.delayed.synchronous or verdict.delayed.delay not in (1, None):
            continue
        wanted = verdict.delayed.optimizer, _alike(verdict.delayed.schedule)
        if wanted not in plans:
            plans[wanted] = _planned(target, *wanted)
        where, synchronous, delayed = plans[wanted]
        carried.append(Transfer(verdict=verdict, target=where, synchronous=synchronous, delayed=delayed))
    return carried


def _planned(
    target: Target, optimizer: str, delayed: tuple[str, ...]
) -> tuple[Target, Layout | None, Layout | None]:
    """What is planned, and the best synchronous and the best delayed layout."""
    base = base_of(target.model, [f"optimizer={optimizer}"])
    tokens = target.tokens_per_step or base.tokens_per_step
    default = DEFAULT_GPU if base.is_model else None
    machine = planned_machine(base.config, source=target.model, device=target.device, default=default)
    if not machine.times_known or machine.limit_gb is None:
        raise UserError(f"--for {target.model}: it names no GPU (site.gpu): give one with --device")
    run: dict[str, Any] = {"gpus": target.gpus, "tokens_per_step": tokens, "limit_gb": machine.limit_gb}
    names = [name for name in CONSIDERED if schedules.is_synchronous(name)] + list(delayed)
    found = listed(machine.config, Shared(machine.costs), names=names, with_sharded=True, **run)
    where = replace(
        target, model=base.config.model.name, tokens_per_step=tokens, device=machine.config.site.gpu
    )
    return where, found.synchronous, found.best.get(KINDS[1])


def _alike(name: str) -> tuple[str, ...]:
    """Schedules whose weights are those of schedule `name`, at the same delay."""
    if name not in schedules.FAMILY or not schedules.find(name).updates_together:
        return (name,)
    return tuple(
        other
        for other in CONSIDERED
        if not schedules.is_synchronous(other) and schedules.find(other).updates_together
    )
