"""`asyncpp plan`: ranks pipeline layouts of a model by memory and step time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.completion import models_and_templates, settings, sites
from asyncpp_cli.errors import UserError
from asyncpp_cli.numbers import finite

if TYPE_CHECKING:
    from asyncpp_cli.planner.estimate import CostModel, Estimate
    from stages.config import ScheduleConfig


def plan(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|TEMPLATE",
            help="Template of a model or an experiment, or its file.",
            autocompletion=models_and_templates,
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Changes, as in optimizer=muon or data.context=4096.",
            autocompletion=settings,
        ),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="Total number of GPUs.")] = 1,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            parser=finite,
            metavar="GB",
            help="Memory of a GPU, 10^9 bytes; default: the device's.",
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            "--site", metavar="NAME", help="Site profile that names its GPUs.", autocompletion=sites
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="GPU for the estimated times; default: h100."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="FILE", help="Use times measured by `asyncpp profile` instead of estimates."
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-step", metavar="T", help="Tokens per step; default: the template's, or 524,288."
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option("--schedule", metavar="NAME", help="Only this schedule; can be repeated."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Layouts to show.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all layouts as a JSON list, best first.")
    ] = False,
) -> None:
    """Show which layouts fit, their memory and speed, best first.

    A layout is a schedule with its stages, pipelines, micro-batches, their size, and recomputation;
    "interleaved-1f1b x 2" has two stages on each rank.
    Times are estimates from data sheets, for comparing layouts, unless --profile gives measured ones.
    """
    import schedules
    from asyncpp_cli.console import say
    from asyncpp_cli.planner.base_config import base_of
    from asyncpp_cli.planner.layouts import CONSIDERED
    from asyncpp_cli.planner.ranking import ranked

    for name in schedule or ():
        if name not in schedules.NAMES:
            raise UserError(f"--schedule {name}: unknown; accepted: {', '.join(schedules.NAMES)}")
    base = base_of(what, changes or [])
    if base.config.model.factory is not None:
        raise UserError(
            f"{what}: model.factory: the costs of a user's own model are unknown; train it to measure them"
        )
    costs, limit = _costs_and_limit(site=site, device=device, profile=profile, memory=memory)
    tokens = tokens_per_step if tokens_per_step is not None else base.tokens_per_step
    estimates = ranked(
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
            [
                _record(
                    estimate,
                    limit_gb=limit,
                    budget=base.token_budget,
                    source=costs.source,
                    threads=costs.threads,
                )
                for estimate in estimates
            ],
            sys.stdout,
            indent=1,
        )
        print()
        return
    _show(
        estimates[:rows],
        total=len(estimates),
        limit_gb=limit,
        budget=base.token_budget,
        gpus=gpus,
        tokens=tokens,
        source=costs.source,
        threads=costs.threads,
    )


def _costs_and_limit(
    *, site: str | None, device: str | None, profile: Path | None, memory: float | None
) -> tuple[CostModel, float]:
    from asyncpp_cli.launch.sites import find_site
    from asyncpp_cli.planner.cells import device_of
    from asyncpp_cli.planner.devices import USABLE, find_device
    from asyncpp_cli.planner.profile_costs import read_profile
    from asyncpp_cli.planner.roofline import Roofline

    site_device = {} if site is None else device_of(find_site(site))
    gpu = find_device(
        device or site_device.get("gpu") or "h100", key="--device" if device else f"--site {site}: gpu"
    )
    costs: CostModel = Roofline(gpu) if profile is None else read_profile(profile)
    limit = memory if memory is not None else site_device.get("memory_gb", gpu.memory_gb * USABLE)
    if not limit > 0:
        raise UserError(f"--memory {limit:g}: accepted: a positive number, 10^9 bytes")
    return costs, float(limit)


def _record(
    estimate: Estimate, *, limit_gb: float, budget: float, source: str, threads: int | None
) -> dict[str, Any]:
    config = estimate.config
    ranks = config.parallel.stages * config.parallel.data
    hours = budget / estimate.tokens_per_second / 3600 * ranks
    return {
        "schedule": config.schedule.name,
        "stages": config.parallel.stages,
        "data_parallel": config.parallel.data,
        "microbatches": config.schedule.microbatches,
        "microbatch_size": config.train.microbatch_size,
        "recompute": config.train.recompute,
        "fits": estimate.memory_gb <= limit_gb,
        "memory_gb": round(estimate.memory_gb, 3),
        "step_time": estimate.step.seconds,
        "tokens_per_second": estimate.tokens_per_second,
        "bubble": estimate.step.bubble,
        "delay": estimate.delay,
        "days": budget / estimate.tokens_per_second / 86400,
        "gpu_hours": hours if threads is None else None,
        "core_hours": None if threads is None else hours * threads,
        "chunks": config.schedule.chunks,
        "ahead": config.schedule.ahead,
        "split": config.schedule.split,
        "times_of": source,
        "cut": list(estimate.cut),
        "rank_of_stage": list(estimate.rank_of_stage),
        "memory": list(estimate.memory),
    }


def _named(schedule: ScheduleConfig) -> str:
    import schedules

    takes_chunks = "chunks" in schedules.options_taken(schedule.name)
    name = f"{schedule.name} x {schedule.chunks}" if takes_chunks and schedule.chunks > 1 else schedule.name
    return name + ", split" * schedule.split + f", ahead {schedule.ahead}" * (schedule.ahead > 1)


def _show(
    estimates: list[Estimate],
    *,
    total: int,
    limit_gb: float,
    budget: float,
    gpus: int,
    tokens: int,
    source: str,
    threads: int | None,
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
    columns += ["tokens/s", "bubble", "delay", "days", "GPU-hours" if threads is None else "core-hours"]
    table = [
        [
            _named(estimate.config.schedule),
            str(estimate.config.parallel.stages),
            str(estimate.config.parallel.data),
            str(estimate.config.schedule.microbatches),
            str(estimate.config.train.microbatch_size),
            estimate.config.train.recompute,
            "yes" if estimate.memory_gb <= limit_gb else f"no ({estimate.memory_gb:.1f} > {limit_gb:.1f})",
            f"{min(estimate.rank_gb):.1f} - {max(estimate.rank_gb):.1f}",
            f"{estimate.step.seconds:.3g}",
            f"{estimate.tokens_per_second:,.0f}",
            f"{estimate.step.bubble:.1%}",
            str(estimate.delay),
            f"{budget / estimate.tokens_per_second / 86400:.3g}",
            f"{budget / estimate.tokens_per_second / 3600 * gpus * (threads or 1):,.4g}",
        ]
        for estimate in estimates
    ]
    model = estimates[0].config.model.name
    kind = "GPUs" if threads is None else "ranks"
    title = (
        f"{model} on {gpus} {kind}, times of {source}, {tokens:,} tokens per step: "
        f"{len(estimates)} of {total} layouts, best first"
    )
    show_table(columns, table, title=title)
    best = estimates[0]
    if not best.own_cut:
        say(f"The first needs parallel.cut: {list(best.cut)}")
    kinds = list(best.memory[0])
    rows = [
        [str(stage), str(size), *(f"{stage_bytes[kind] / 1e9:.2f}" for kind in kinds), f"{total_gb:.2f}"]
        for stage, (size, stage_bytes, total_gb) in enumerate(
            zip(best.cut, best.memory, best.stage_gb, strict=True)
        )
    ]
    show_table(
        ["stage", "blocks", *kinds, "all"],
        rows,
        title=f"The first of them, GB per stage (limit {limit_gb:.1f})",
    )
