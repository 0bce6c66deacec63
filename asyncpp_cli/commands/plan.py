"""`asyncpp plan`: the ways to lay a model out over GPUs, and what each takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.planner.estimate import Costs, Estimate
    from stages.config import ScheduleConfig


def plan(
    what: Annotated[
        str,
        typer.Argument(metavar="MODEL|TEMPLATE", help="Template of a model or an experiment, or its file."),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes, as in optimizer=muon or data.context=4096."),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="GPUs in all.")] = 1,
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GB", help="Memory of a GPU, 10^9 bytes; otherwise the device's."),
    ] = None,
    site: Annotated[
        str | None, typer.Option("--site", metavar="NAME", help="Site profile that says what its GPUs are.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="GPU for the estimated times; else h100."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Times measured by `asyncpp profile`, not estimated."),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-step", metavar="T", help="Tokens a step; else the template's, or 524,288."
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option("--schedule", metavar="NAME", help="Only this schedule; can be repeated."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Layouts to show.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of them, as a list on standard output, best first.")
    ] = False,
) -> None:
    """Show which layouts fit, the memory they take by kind, and how fast they are; best first.

    A layout is a schedule with its stages, pipelines, micro-batches, their size, and recomputation;
    interleaved-1f1b with "x 2" is the one of two stages a rank.
    Times are estimates from data sheets unless --profile gives measured ones: good for comparing layouts.
    """
    import schedules
    from asyncpp_cli.console import say
    from asyncpp_cli.planner.base import base_of
    from asyncpp_cli.planner.layouts import CONSIDERED
    from asyncpp_cli.planner.ranking import ranked

    for name in schedule or ():
        if name not in schedules.NAMES:
            raise UserError(f"--schedule {name}: unknown; accepted: {', '.join(schedules.NAMES)}")
    base = base_of(what, changes or [])
    if base.config.model.factory is not None:
        raise UserError(
            f"{what}: model.factory: what a model of your own takes is not known; train it and see"
        )
    costs, limit = _costs_and_limit(site=site, device=device, profile=profile, memory=memory)
    tokens = tokens_per_step if tokens_per_step is not None else base.tokens_per_step
    found = ranked(
        base.config,
        gpus=gpus,
        tokens_per_step=tokens,
        names=schedule or CONSIDERED,
        costs=costs,
        limit_gb=limit,
    )
    if base.note:
        say(base.note)
    if as_json:
        json.dump(
            [_record(one, limit_gb=limit, budget=base.token_budget, source=costs.source) for one in found],
            sys.stdout,
            indent=1,
        )
        print()
        return
    _show(
        found[:rows],
        total=len(found),
        limit_gb=limit,
        budget=base.token_budget,
        gpus=gpus,
        tokens=tokens,
        source=costs.source,
    )


def _costs_and_limit(
    *, site: str | None, device: str | None, profile: Path | None, memory: float | None
) -> tuple[Costs, float]:
    from asyncpp_cli.cluster.sites import find_site
    from asyncpp_cli.planner.cells import device_of
    from asyncpp_cli.planner.devices import USABLE, find_device
    from asyncpp_cli.planner.measured import read_profile
    from asyncpp_cli.planner.parts import Roofline

    said = {} if site is None else device_of(find_site(site))
    known = find_device(
        device or said.get("gpu") or "h100", key="--device" if device else f"--site {site}: gpu"
    )
    costs: Costs = Roofline(known) if profile is None else read_profile(profile)
    limit = memory if memory is not None else said.get("memory_gb", known.memory_gb * USABLE)
    if not limit > 0:
        raise UserError(f"--memory {limit:g}: accepted: a number of 10^9 bytes above 0")
    return costs, float(limit)


def _record(one: Estimate, *, limit_gb: float, budget: float, source: str) -> dict[str, Any]:
    config = one.config
    return {
        "schedule": config.schedule.name,
        "stages": config.parallel.stages,
        "data_parallel": config.parallel.data,
        "microbatches": config.schedule.microbatches,
        "microbatch_size": config.train.microbatch_size,
        "recompute": config.train.recompute,
        "fits": one.memory_gb <= limit_gb,
        "memory_gb": round(one.memory_gb, 3),
        "step_time": one.step.seconds,
        "tokens_per_second": one.tokens_per_second,
        "bubble": one.step.bubble,
        "delay": one.delay,
        "days": budget / one.tokens_per_second / 86400,
        "chunks": config.schedule.chunks,
        "ahead": config.schedule.ahead,
        "times_of": source,
        "cut": list(one.cut),
        "memory": list(one.memory),
    }


def _named(schedule: ScheduleConfig) -> str:
    if schedule.ahead > 1:
        return f"{schedule.name}, ahead {schedule.ahead}"
    return schedule.name if schedule.chunks == 1 else f"{schedule.name} x {schedule.chunks}"


def _show(
    found: list[Estimate],
    *,
    total: int,
    limit_gb: float,
    budget: float,
    gpus: int,
    tokens: int,
    source: str,
) -> None:
    from asyncpp_cli.console import say, show_table

    columns = [
        "schedule",
        "stages",
        "pipelines",
        "micro-batches",
        "size",
        "recompute",
        "fits",
        "GB",
        "step s",
    ]
    columns += ["tokens/s", "bubble", "delay", "days"]
    table = [
        [
            _named(one.config.schedule),
            str(one.config.parallel.stages),
            str(one.config.parallel.data),
            str(one.config.schedule.microbatches),
            str(one.config.train.microbatch_size),
            "yes" if one.config.train.recompute else "no",
            "yes" if one.memory_gb <= limit_gb else f"no ({one.memory_gb:.1f} > {limit_gb:.1f})",
            f"{min(one.rank_gb):.1f} - {max(one.rank_gb):.1f}",
            f"{one.step.seconds:.3g}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.step.bubble:.1%}",
            str(one.delay),
            f"{budget / one.tokens_per_second / 86400:.3g}",
        ]
        for one in found
    ]
    model = found[0].config.model.name
    title = (
        f"{model} on {gpus} GPUs, times of {source}, {tokens:,} tokens a step: "
        f"{len(found)} of {total} layouts, best first"
    )
    show_table(columns, table, title=title)
    best = found[0]
    if not best.own_cut:
        say(f"The first needs parallel.cut: {list(best.cut)}")
    kinds = list(best.memory[0])
    rows = [
        [str(stage), str(size), *(f"{of_stage[kind] / 1e9:.2f}" for kind in kinds), f"{total_gb:.2f}"]
        for stage, (size, of_stage, total_gb) in enumerate(
            zip(best.cut, best.memory, best.stage_gb, strict=True)
        )
    ]
    show_table(
        ["stage", "blocks", *kinds, "all"],
        rows,
        title=f"The first of them, GB a stage (limit {limit_gb:.1f})",
    )
