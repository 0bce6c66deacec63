"""`asyncpp plan`: ranks pipeline layouts of a model by memory and step time."""

from __future__ import annotations

import gc
import json
import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.base.console import finite, to_write
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import AllowCode, template_words

if TYPE_CHECKING:
    from asyncpp_cli.planner.base_config import Base
    from asyncpp_cli.planner.costs.profile_costs import Measured
    from asyncpp_cli.planner.estimate import Estimate
    from asyncpp_cli.planner.fsdp import Sharded
    from asyncpp_cli.planner.stage_times import CostModel


@contextmanager
def _planning() -> Iterator[None]:
    """Facts that take long to find are kept on disk, and the garbage collector is off: programs are millions
    of tuples, which references alone free, and its passes over them take a sixth of the time."""
    from asyncpp_cli.planner.kept import keeping

    gc.disable()
    try:
        with keeping():
            yield
    finally:
        gc.enable()


@_planning()
def plan(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|TEMPLATE",
            help="Template of a model or an experiment, or its file; with --balance also a run, DIR/PREFIX.",
            autocompletion=template_words,
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes, as in optimizer=muon or data.context=4096.",
        ),
    ] = None,
    allow_code: AllowCode = None,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="Total number of GPUs.")] = 1,
    memory: Annotated[
        float | None,
        typer.Option(parser=finite, metavar="GB", help="Memory of a GPU, 10^9 bytes; default: the device's."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Site profile that names its GPUs."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU for the estimated times; a model's default: h100.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            parser=finite, metavar="GBIT", help="Network of each GPU, Gbit/s; default: the device's."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use the times of a file that --measure wrote, not estimates."),
    ] = None,
    measure_to: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            metavar="FILE",
            help="Measure the model's parts on this machine first, write their times, and use them.",
            callback=to_write,
        ),
    ] = None,
    microbatch_sizes: Annotated[
        list[int] | None,
        typer.Option(
            "--microbatch-size",
            metavar="N",
            min=1,
            help="With --measure: sequences per micro-batch; can be repeated.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --measure: measurements of each part.")
    ] = 20,
    tokens_per_step: Annotated[
        list[int] | None,
        typer.Option(
            metavar="T",
            min=1,
            help="Tokens per step; default: the template's, or 524,288. With --map: can be repeated; "
            "default: half, 1, 2 and 4 times that.",
        ),
    ] = None,
    as_map: Annotated[
        bool,
        typer.Option(
            "--map",
            help="Best synchronous and asynchronous layouts, over GPUs (powers of two up to N) and tokens.",
        ),
    ] = False,
    as_balance: Annotated[
        bool,
        typer.Option(
            "--balance",
            help="How evenly the model is cut into 4, 8 and 16 stages, by multiply-adds; of a run, by the "
            "times of its ranks, and the cut that evens them out.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --map: draw it, too (SVG, PNG, PDF); needs the extra `plot`.",
            callback=to_write,
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this schedule; can be repeated.")
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to show.")] = 20,
    row: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="The one to show by rank, and as settings; default: the first pipeline."
        ),
    ] = None,
    as_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write that one as a template, for asyncpp sweep.", callback=to_write
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all layouts as a JSON list, best first.")
    ] = False,
) -> None:
    """Show which layouts fit, their memory and speed, best first.

    A layout is a schedule with its stages, pipelines, micro-batches, their size, and recomputation;
    "interleaved-1f1b x 2" has two stages on each rank.
    Times are estimates from data sheets, for comparing layouts, unless --measure or --profile is given.
    --measure times forward and backward of embedding, block and head, and their optimizer step, on the GPU if
    there is one, else on `site.threads` CPU threads.
    """
    import schedules
    from asyncpp_cli.base.atomic_files import write_output
    from asyncpp_cli.base.console import quoted, say
    from asyncpp_cli.planner.base_config import base_of
    from asyncpp_cli.planner.costs.devices import DEVICES
    from asyncpp_cli.planner.costs.profile_costs import read_profile
    from asyncpp_cli.planner.costs.roofline import Roofline
    from asyncpp_cli.planner.decision import best_layouts
    from asyncpp_cli.planner.estimate import Estimate
    from asyncpp_cli.planner.fsdp import best_sharded
    from asyncpp_cli.planner.layouts import CONSIDERED
    from asyncpp_cli.planner.ranking import ranked
    from asyncpp_cli.runs.experiment_folder import run_is_named
    from stages.config.keys import unknown
    from stages.data.documents import computed_share

    if as_template is not None and (as_json or as_map):
        raise UserError(f"--as-template: leave out {'--json' if as_json else '--map'}")
    for name in schedule or ():
        if name not in schedules.NAMES:
            raise UserError(f"--schedule: {unknown(name, schedules.NAMES)}")
    if as_balance and run_is_named(what):
        if changes:
            raise UserError(f"--balance of a run takes no {changes[0]}: it was trained with its own settings")
        _show_measured_balance(Path(what), as_json=as_json)
        return
    base = base_of(what, changes or [], allow_code=allow_code or ())
    if base.config.model.factory is not None:
        raise UserError(
            f"{what}: model.factory: the costs of a user's own model are unknown; train it to measure them"
        )
    if as_balance:
        _show_balance(base, as_json=as_json)
        return
    measured = None
    if measure_to is not None:
        from asyncpp_cli.planner.costs.measure import measure

        if profile is not None:
            raise UserError("--measure and --profile both give times: leave one out")
        measured = measure(base.config, measure_to, microbatch_sizes=microbatch_sizes or [], repeats=repeats)
    elif profile is not None:
        measured = read_profile(profile)
    order = _order(base, gpus, site=site, device=device, measured=measured, memory=memory)
    if bandwidth is not None:
        if bandwidth <= 0:
            raise UserError(f"--bandwidth {bandwidth:g}: accepted: more than 0")
        if not isinstance(order.costs, Roofline):
            raise UserError("--bandwidth changes estimated times: leave out --profile and --measure")
        of_device = replace(order.costs.device, network_gbs=bandwidth / 8)
        order = replace(order, costs=replace(order.costs, device=of_device))
    names = schedule or CONSIDERED
    if as_map:
        _show_map(
            order,
            tokens_per_step=tokens_per_step,
            names=names,
            with_sharded=not schedule,
            as_json=as_json,
            out=out,
        )
        return
    if out is not None or len(tokens_per_step or ()) > 1:
        raise UserError("--out, and several --tokens-per-step, are accepted with --map")
    tokens = tokens_per_step[0] if tokens_per_step else base.tokens_per_step
    asked: dict[str, Any] = {
        "gpus": gpus,
        "tokens_per_step": tokens,
        "costs": order.costs,
        "limit_gb": order.limit_gb,
    }
    estimates = ranked(order.base.config, names=names, all_of_them=as_json, **asked)
    if base.note:
        say(base.note)
    if base.config.data.document_mask:
        share = computed_share(base.config.data)
        say(f"Attention within documents is {share:.0%} of causal attention in this data; times count that.")
    sharded: list[Sharded] = []
    if order.times_known and not schedule:
        sharded = best_sharded(order.base.config, **asked)
    if as_json:
        _print_json([_record(each, order) for each in _among(sharded, list(estimates), order)])
        return
    pipelines, alike = _different(estimates, rows=rows)
    said = [f"the best {len(pipelines)} pipelines"]
    # Of all layouts, shown or not.
    of_kinds = best_layouts(order.base.config, names=names, **asked)
    synchronous, delayed, more_delayed = (None if best is None else best.layout for best in of_kinds.values())
    if isinstance(synchronous, Estimate) and not any(each.delay == 0 for each in pipelines):
        pipelines.append(synchronous)
        said.append("the best synchronous one")
    if sharded:
        said.append("FSDP")
    shown = _among(sharded, pipelines, order)
    best = min(
        (each for each in (synchronous, *sharded) if each is not None),
        key=lambda each: each.step.seconds,
        default=None,
    )
    number = row or 1 + shown.index(pipelines[0])
    if number > len(shown):
        raise UserError(f"--row {row}: accepted: 1 to {len(shown)}, the layouts that are shown")
    chosen = shown[number - 1]
    if chosen not in pipelines:
        raise UserError(f"--row {row}: {chosen.name} is not trained by asyncpp; accepted: a pipeline's row")
    _show(shown, best, order, title=f"{tokens:,} tokens per step: {' and '.join(said)}")
    if alike:
        say(
            f"{alike} layouts that take as long as one of these and differ from it in micro-batches and size "
            "alone are left out (--json has them)."
        )
    if sharded and best is not None:
        say(_decision(sharded[0], best, [delayed, more_delayed]))
    elif order.times_known and not schedule and gpus > 1 and isinstance(order.costs, Roofline):
        say(_without_sharded(order, tokens))
    _show_memory(chosen, order, title="The first of them" if number == 1 else f"Row {number}")
    if chosen.exceeds(order.limit_gb):
        if as_template is not None:
            raise UserError(f"--as-template: no layout of these fits {order.limit_gb:.1f} GB")
        say("It does not fit, so its settings are not shown.")
        return
    settings = _settings(chosen, order.base)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    say(f"Row {number} as settings: {shlex.join(f'{key}={text}' for key, text in texts.items())}")
    if as_template is not None:
        text = _template(what, order.base, changes or [], settings, tokens=tokens)
        write_output(as_template, text.encode())
        say(f"Wrote {as_template}: asyncpp sweep {quoted(as_template)} --list")
    if not order.times_known:
        say(
            f"No times are shown, since {what} names no GPU: --device {'|'.join(DEVICES)} estimates them, "
            f"and --profile FILE takes those of this machine (asyncpp plan --measure). The order is that of "
            f"{order.costs.source}."
        )


def _template(
    what: str, base: Base, changes: Sequence[str], settings: Mapping[str, Any], *, tokens: int
) -> str:
    """A template that trains a layout, in YAML.

    Args:
        what: the planned model or template; a file is named by its full path, since the new template may be
            in another folder.
        base: what was planned.
        changes: given as KEY=VALUE.
        settings: of the layout; they replace changes of the same keys.
        tokens: per step.
    """
    from asyncpp_cli.experiment.template import canonical

    name = json.dumps(str(Path(what).resolve())) if Path(what).is_file() else what
    lines = {"base": name}
    if base.is_model:
        steps = round(base.token_budget / tokens)
        lines = {
            "model": name,
            "train.steps": f"{steps}  # 20 tokens per active parameter",
            "optimizer": base.config.optimizer.name,
        }
    given = (change.partition("=") for change in changes)
    lines |= {canonical(key): text for key, _, text in given}
    lines |= {canonical(key): json.dumps(value) for key, value in settings.items()}
    return "".join(f"{key}: {text}\n" for key, text in lines.items())


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What is planned, on which machine."""

    base: Base
    gpus: int
    """Number of ranks."""
    costs: CostModel
    limit_gb: float
    """Memory of a rank, 10^9 bytes."""
    times_known: bool
    """Whether the costs are those of the run's machine."""

    @property
    def threads(self) -> int | None:
        """Cores of a rank; None: the times are those of a GPU."""
        return self.costs.threads


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=1))


def _show_balance(base: Base, *, as_json: bool) -> None:
    """Print how evenly stages of whole blocks, and cuts within blocks, share the work."""
    from asyncpp_cli.base.console import show_table
    from asyncpp_cli.planner.balance import balances

    found = list(balances(base.config))
    if as_json:
        _print_json([each._asdict() for each in found])
        return
    show_table(
        ["stages", "whole blocks", "within blocks", "parallel.cut", "head in shards", "parallel.cut then"],
        [
            [
                str(each.stages),
                f"{each.whole:.3f}",
                f"{each.within:.3f}",
                ", ".join(map(str, each.cut)),
                f"{each.sharded:.3f}",
                ", ".join(map(str, each.sharded_cut)),
            ]
            for each in found
        ],
        title=f"{base.config.model.name}, sequences of {base.config.data.context} tokens: mean multiply-adds "
        "of a rank over those of the largest",
    )


def _show_measured_balance(folder: Path, *, as_json: bool) -> None:
    """Print how even a run's ranks were, and the cut for ranks that are as fast."""
    from asyncpp_cli.base.console import show_line, show_table
    from asyncpp_cli.planner.balance import measured_balance
    from asyncpp_cli.runs.experiment_folder import run_at
    from asyncpp_cli.schedule_tools.programs import measured_run

    run = run_at(folder)
    config = run.config()
    if config.model.factory is not None:
        raise UserError(f"{folder}: model.factory: what a part of a user's own model costs is unknown")
    if config.parallel.shard_head:
        raise UserError(f"{folder}: parallel.shard_head: shards of the head are not planned for")
    found = measured_balance(config, measured_run(run.folder).times)
    if as_json:
        known = found._asdict() | {
            "efficiency": found.efficiency,
            "expected_efficiency": found.expected_efficiency,
        }
        _print_json(known)
        return
    rows = zip(found.seconds, found.speed, found.expected, strict=True)
    show_table(
        ["rank", "ms per micro-batch", "speed", "ms expected"],
        [
            [str(rank), f"{1e3 * took:.3g}", f"{speed:.2f}", f"{1e3 * expected:.3g}"]
            for rank, (took, speed, expected) in enumerate(rows)
        ],
        title=f"{run.id}: what each rank computes for a micro-batch; speed: multiply-adds per second over "
        "the mean of the ranks",
    )
    show_line(
        f"Mean over the slowest rank: {found.efficiency:.3f} with parallel.cut: {_listed(found.cut)}; "
        f"expected {found.expected_efficiency:.3f} with parallel.cut: {_listed(found.even_cut)}, whose "
        "memory is not checked here (asyncpp sweep --list does)."
    )
    if found.costs is not None:
        show_line(
            f"Proportions of forward and of the two halves of a backward: schedule.costs: {found.costs}"
        )


def _listed(cut: list[float]) -> str:
    return f"[{', '.join(map(str, cut))}]"


def _show_map(
    order: _Order,
    *,
    tokens_per_step: list[int] | None,
    names: Collection[str],
    with_sharded: bool,
    as_json: bool,
    out: Path | None,
) -> None:
    """Print the map, as a table or as JSON, and draw it into `out`."""
    from asyncpp_cli.base.atomic_files import drawing
    from asyncpp_cli.base.console import say, show_table
    from asyncpp_cli.base.tables import Fit
    from asyncpp_cli.planner import decision
    from asyncpp_cli.planner.costs.roofline import Roofline
    from asyncpp_cli.sites.resources import cores_here

    base, costs = order.base, order.costs
    if order.gpus < 2:
        raise UserError(f"--map --gpus {order.gpus}: accepted: 2 or more")
    if not order.times_known:
        raise UserError("--map needs times: name a GPU (--device, --site) or a --profile")
    tokens = tokens_per_step or [int(factor * base.tokens_per_step) for factor in decision.TOKENS]
    points = decision.decision_map(
        base.config,
        gpus=order.gpus,
        tokens_per_step=sorted(set(tokens)),
        costs=costs,
        limit_gb=order.limit_gb,
        names=names,
        with_sharded=with_sharded,
        processes=cores_here(),
    )
    title = f"{base.config.model.name} with {base.config.optimizer.name}, times of {costs.source}"
    if isinstance(costs, Roofline):
        title += f", {8 * costs.device.network_gbs:g} Gbit/s"
    if out is not None:
        with drawing(out) as picture:
            decision.draw(points, title=title, file=picture)
    if as_json:
        records = []
        for point in points:
            record: dict[str, Any] = {
                "gpus": point.gpus,
                "tokens_per_step": point.tokens_per_step,
                "fastest": point.fastest,
            }
            synchronous = point.synchronous
            found = {**point.best, "sharded": point.sharded, "larger batch": point.larger_batch}
            for kind, best in found.items():
                record[kind] = None
                if best is not None:
                    ratio = synchronous and synchronous.seconds / best.seconds
                    ratio = point.larger_batch_ratio if kind == "larger batch" else ratio
                    layout = _record(best.layout, order)
                    record[kind] = layout | {"ratio": ratio, "losses": best.losses, "limit": best.limit}
            records.append(record)
        _print_json(records)
    else:
        columns = ["tokens per step", "GPUs", "fastest", "synchronous", "delay 1", "r", "GB", "2 x batch"]
        columns += ["more delay", "FSDP loses"]
        rows = []
        for point in points:
            synchronous, delayed, more = point.synchronous, point.best["delay 1"], point.best["more delay"]
            ratio, larger = point.ratio("delay 1"), point.larger_batch_ratio
            rows.append(
                [
                    f"{point.tokens_per_step:,}",
                    f"{point.gpus:,}",
                    point.fastest or "none fits",
                    "-" if synchronous is None else _short(synchronous.layout),
                    "-" if delayed is None else _short(delayed.layout),
                    "-" if ratio is None else f"{ratio:.2f}",
                    "-" if delayed is None else f"{delayed.layout.memory_gb:.1f}",
                    "-" if larger is None else f"{larger:.2f}",
                    "-" if more is None else f"{_short(more.layout)}, delay {more.layout.delay}",
                    "-" if point.sharded is None else f"{point.sharded.losses['network']:.0%}",
                ]
            )
        show_table(
            columns,
            rows,
            title=f"{title}, at most {order.limit_gb:.1f} GB",
            fit=Fit(share=["tokens per step"], hide=["FSDP loses", "more delay", "GB", "2 x batch"]),
        )
        say(
            "Layouts: schedule, stages x pipelines. r: time of the best synchronous step, FSDP among them, "
            "over that of delay 1, which pays where it needs fewer than r times the steps. GB: of delay 1. "
            "2 x batch: tokens per second of the best synchronous layout with twice the tokens per step, "
            "over those of this one. More delay is shown where it is faster than the others. "
            "FSDP loses: to its exchanges, of its step."
        )
    if out is not None:
        say(f"Wrote {out}")


def _short(layout: Estimate | Sharded) -> str:
    parallel = layout.config.parallel
    return f"{layout.name} {parallel.stages} x {parallel.data}" if layout.cut else layout.name


def _order(
    base: Base,
    gpus: int,
    *,
    site: str | None,
    device: str | None,
    measured: Measured | None,
    memory: float | None,
) -> _Order:
    from asyncpp_cli.planner.cells import DEFAULT_GPU, planned_machine
    from asyncpp_cli.sites.profile import find_site

    if memory is not None and not memory > 0:
        raise UserError(f"--memory {memory:g}: accepted: a positive number, 10^9 bytes")
    machine = planned_machine(
        base.config,
        device=device,
        site=None if site is None else find_site(site),
        profile=measured,
        default=DEFAULT_GPU if base.is_model else None,
    )
    limit = machine.limit_gb if memory is None else memory
    return _Order(
        base=replace(base, config=machine.config),
        gpus=gpus,
        costs=machine.costs,
        limit_gb=math.inf if limit is None else limit,
        times_known=machine.times_known,
    )


def _record(estimate: Estimate | Sharded, order: _Order) -> dict[str, Any]:
    config, threads = estimate.config, order.threads
    seconds = order.base.token_budget / estimate.tokens_per_second
    hours = seconds / 3600 * (config.parallel.stages * config.parallel.data)
    return {
        "schedule": config.schedule.name if estimate.cut else estimate.name,
        "stages": config.parallel.stages,
        "data_parallel": config.parallel.data,
        "microbatches": config.schedule.microbatches,
        "microbatch_size": config.train.microbatch_size,
        "recompute": config.train.recompute,
        "fits": estimate.memory_gb <= order.limit_gb,
        "memory_gb": round(estimate.memory_gb, 3),
        "step_time": estimate.step.seconds,
        "tokens_per_second": estimate.tokens_per_second,
        "bubble": estimate.step.bubble,
        "delay": estimate.delay,
        "days": seconds / 86400,
        "gpu_hours": hours if threads is None else None,
        "core_hours": None if threads is None else hours * threads,
        "chunks": config.schedule.chunks,
        "ahead": config.schedule.ahead,
        "split": config.schedule.split,
        "shard_head": config.parallel.shard_head,
        "times_of": order.costs.source,
        "cut": list(estimate.cut),
        "rank_of_stage": list(estimate.rank_of_stage),
        "memory": list(estimate.memory),
    }


def _settings(estimate: Estimate, base: Base) -> dict[str, Any]:
    """What a layout sets beyond the planned run, by configuration key."""
    from asyncpp_cli.runs.settings import items

    before = dict(items(base.config))
    layout = ("schedule.name", "schedule.microbatches", "parallel.stages", "parallel.data")
    changed = {
        key: value
        for key, value in items(estimate.config)
        if value != before.get(key) or key in (*layout, "train.microbatch_size")
    }
    return changed if estimate.own_cut else changed | {"parallel.cut": list(estimate.cut)}


def _among(
    sharded: Sequence[Sharded], pipelines: Iterable[Estimate], order: _Order
) -> list[Estimate | Sharded]:
    """All of them in the order of pipelines: those that fit first, the fastest at the top."""
    return sorted((*sharded, *pipelines), key=lambda each: (each.exceeds(order.limit_gb), each.step.seconds))


def _decision(
    sharded: Sharded, synchronous: Estimate | Sharded, delayed: Sequence[Estimate | Sharded | None]
) -> str:
    """What to use, in a sentence or two, from the best of all layouts: synchronous, and by delay."""
    kind = sharded.name.partition(",")[0].upper()
    lost = f"Here {kind} loses {sharded.lost:.1%} of its step to exchanges"
    faster = (each for each in delayed if each and each.step.seconds < synchronous.step.seconds)
    # What the least delay costs is known best.
    late = next(faster, None)
    if late is None:
        return f"{lost}. Use {synchronous.place}: no layout with a delay is faster."
    more = synchronous.step.seconds / late.step.seconds - 1
    return (
        f"{lost}; the best synchronous choice is {synchronous.place}. {late.place} pays if its delay of "
        f"{late.delay} costs fewer than {more:.1%} more steps; training tells (asyncpp sweep verdict)."
    )


def _without_sharded(order: _Order, tokens: int) -> str:
    """Why there is no layout of FSDP, and which tokens per step would have one."""
    gpus, context = order.gpus, order.base.config.data.context
    unit = gpus * context
    if tokens % unit == 0:
        return f"FSDP: no layout of it fits {order.limit_gb:.1f} GB."
    accepted = " or ".join(f"{count * unit:,}" for count in (tokens // unit, tokens // unit + 1) if count)
    return (
        f"FSDP: {tokens:,} tokens per step do not divide into sequences of {context:,} for {gpus} GPUs; "
        f"--tokens-per-step {accepted} would."
    )


def _show(
    shown: Sequence[Estimate | Sharded], synchronous: Estimate | Sharded | None, order: _Order, *, title: str
) -> None:
    """Print layouts as a table, their step times beside that of the best synchronous one."""
    from asyncpp_cli.base.console import show_table
    from asyncpp_cli.base.tables import Fit
    from asyncpp_cli.planner.costs.roofline import Roofline
    from asyncpp_cli.runs.attempts.cost import amount

    gpus, threads, limit_gb, costs = order.gpus, order.threads, order.limit_gb, order.costs
    source = costs.source if order.times_known else None
    unit, size, form = _unit(shown)
    hours = "GPU-hours" if threads is None else "core-hours"
    columns = ["schedule", "stages", "pipelines", "micro-batches x size", "recompute", "fits"]
    columns += [f"{unit} per rank", "delay"]
    columns += [] if source is None else ["tokens/s", "x sync", "MFU", "bubble", "training", "step s", hours]
    table = []
    for estimate in shown:
        config, seconds = estimate.config, order.base.token_budget / estimate.tokens_per_second
        least, most = (form.format(bound(estimate.rank_gb) / size) for bound in (min, max))
        fits = estimate.memory_gb <= limit_gb
        cells = [
            estimate.name,
            str(config.parallel.stages),
            str(config.parallel.data),
            f"{config.schedule.microbatches} x {config.train.microbatch_size}",
            config.train.recompute,
            "yes" if fits else f"no ({estimate.memory_gb:.1f} > {limit_gb:.1f} GB)",
            least if least == most else f"{least} to {most}",
            str(estimate.delay),
        ]
        if source is not None:
            ratio = synchronous and synchronous.step.seconds / estimate.step.seconds
            speed = estimate.tokens_per_second
            cells += [f"{speed:,.0f}", "-" if ratio is None else f"{ratio:.2f}"]
            of_gpu = costs if isinstance(costs, Roofline) else None
            cells.append("-" if of_gpu is None else f"{of_gpu.mfu(config, tokens_per_second=speed):.1%}")
            cells += [f"{estimate.step.bubble:.1%}", _span(seconds)]
            cells += [f"{estimate.step.seconds:.3g}", amount(seconds / 3600 * gpus * (threads or 1))]
        table.append(cells)
    kind = "rank" if threads is not None or source is None else "GPU"
    start = f"{shown[0].config.model.name} on {gpus} {kind}{'' if gpus == 1 else 's'}, "
    start += "" if source is None else f"times of {source}, "
    hidden = [hours, "step s", "MFU", "bubble", "training", "tokens/s", "micro-batches x size"]
    fit = Fit(share=columns[1:], hide=hidden)
    show_table(columns, table, title=start + title, fit=fit)


def _show_memory(layout: Estimate, order: _Order, *, title: str) -> None:
    """Print what each rank of a layout holds, by kind."""
    from asyncpp_cli.base.console import show_table

    unit, size, form = _unit([layout])
    print()
    context = ", beside CUDA's context" if order.threads is None and order.times_known else ""
    limit = f" (limit {order.limit_gb:.1f} GB{context})" if math.isfinite(order.limit_gb) else ""
    kinds = [name for name in layout.memory[0] if any(rank_bytes[name] for rank_bytes in layout.memory)]
    show_table(
        ["rank", "blocks", "all", *kinds],
        [
            [
                str(rank),
                " + ".join(
                    str(blocks)
                    # Shards of the head are stages without blocks, behind the others.
                    for blocks, holder in zip(layout.cut, layout.rank_of_stage, strict=False)
                    if holder == rank
                ),
                form.format(total / size),
                *(form.format(held[name] / 1e9 / size) for name in kinds),
            ]
            for rank, (held, total) in enumerate(zip(layout.memory, layout.rank_gb, strict=True))
        ],
        title=f"{title}, {unit} per rank{limit}",
    )


def _unit(layouts: Sequence[Estimate | Sharded]) -> tuple[str, float, str]:
    """The unit of memory that suits these layouts, in 10^9 bytes, and how a number of it is written."""
    return ("MB", 1e-3, "{:,.0f}") if max(each.memory_gb for each in layouts) < 1 else ("GB", 1.0, "{:,.2f}")


def _different(estimates: Iterator[Estimate], *, rows: int) -> tuple[list[Estimate], int]:
    """The first `rows` of the estimates, and how many others are like one of them.

    Of layouts that differ in micro-batches and size alone and take as long, the one with least memory is
    taken.
    """
    alike: dict[tuple[Any, ...], list[Estimate]] = {}
    last = 0.0
    for estimate in estimates:
        config = estimate.config
        layout = (
            estimate.name,
            config.parallel.stages,
            config.parallel.data,
            config.train.recompute,
        )
        seconds = f"{estimate.step.seconds:.3g}"
        key = (*layout, seconds, f"{estimate.step.bubble:.1%}", estimate.delay)
        if len(alike) < rows or key in alike:
            alike.setdefault(key, []).append(estimate)
            last = float(seconds)
            continue
        if float(seconds) != last:
            break
    shown = [min(group, key=lambda each: each.memory_gb) for group in alike.values()]
    return shown, sum(map(len, alike.values())) - len(shown)


def _span(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if seconds < most * size:
            return f"{seconds / size:.3g} {unit}" if seconds >= 0.01 else "< 0.01 s"
    return f"{seconds / 86400:,.3g} days" if seconds < 1e3 * 86400 else f"{seconds / 86400:,.0f} days"
