"""What `asyncpp plan` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.base.console import show_line, show_table
from asyncpp_cli.base.tables import Fit
from asyncpp_cli.planner.balance import Balance, MeasuredBalance
from asyncpp_cli.planner.base_config import Base
from asyncpp_cli.planner.certainty import WITHIN, kind_of, likely_ratio
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.decision import Point
from asyncpp_cli.planner.estimate import Estimate
from asyncpp_cli.planner.fsdp import Sharded
from asyncpp_cli.planner.layouts import CONSIDERED
from asyncpp_cli.planner.listing import KINDS, Layout, Listing, has_room
from asyncpp_cli.planner.shared import CostModel
from asyncpp_cli.runs.attempts.cost import amount
from stages.config.run_config import RunConfig, chosen_correction, tokens_per_step

LIKELY = "likely x sync"
"""Column of the interval of `x sync`."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is planned, on which machine."""

    base: Base
    gpus: int
    """Number of ranks."""
    costs: CostModel
    limit_gb: float
    """Memory of a rank, 10^9 bytes."""
    times_known: bool
    """Whether the costs are those of the run's machine."""
    names: Sequence[str] = CONSIDERED
    """Schedules to consider."""

    @property
    def with_sharded(self) -> bool:
        """Whether FSDP and HSDP are considered: unless schedules are named, or times are not known."""
        return self.times_known and self.names is CONSIDERED

    @property
    def threads(self) -> int | None:
        """Cores of a rank; None: the times are those of a GPU."""
        return self.costs.threads

    @property
    def assumed(self) -> str:
        """What is assumed, for titles."""
        config = self.base.config
        compiled = "not compiled" if config.train.compile is False else "compiled blocks"
        words = [config.optimizer.name, f"sequences of {config.data.context:,} tokens", compiled]
        if feedback := config.error_feedback.coefficient:
            words.insert(1, f"error feedback {feedback:g}")
        if isinstance(self.costs, Roofline):
            device = self.costs.device
            rate = 8 * device.network_gbs
            node = device.gpus_per_node
            words.append(f"{node} GPU{'s' * (node > 1)} per node")
            each = f"{node * rate:g} Gbit/s per node" if device.shares_adapter else f"{rate:g} Gbit/s per GPU"
            words.append(each)
        return ", ".join(words)


def among(sharded: Sequence[Sharded], pipelines: Iterable[Estimate], order: Order) -> list[Layout]:
    """All of them in the order of pipelines: those that fit first, the fastest at the top."""
    return sorted((*sharded, *pipelines), key=lambda each: (each.exceeds(order.limit_gb), each.step.seconds))


def record(layout: Layout, order: Order) -> dict[str, Any]:
    """The numbers of a layout, for JSON."""
    config, threads = layout.config, order.threads
    seconds = _training_seconds(layout, order)
    hours = seconds / 3600 * (config.parallel.stages * config.parallel.data)
    return {
        "schedule": config.schedule.name if layout.cut else layout.name,
        "stages": config.parallel.stages,
        "data_parallel": config.parallel.data,
        "microbatches": config.schedule.microbatches,
        "microbatch_size": config.train.microbatch_size,
        "recompute": config.train.recompute,
        "fits": layout.memory_gb <= order.limit_gb,
        "memory_gb": round(layout.memory_gb, 3),
        "step_time": layout.step.seconds,
        "tokens_per_second": layout.tokens_per_second,
        "bubble": layout.step.bubble,
        "delay": layout.delay,
        "days": seconds / 86400,
        "gpu_hours": hours if threads is None else None,
        "core_hours": None if threads is None else hours * threads,
        "chunks": config.schedule.chunks,
        "ahead": config.schedule.ahead,
        "split": config.schedule.split,
        "shard_head": config.parallel.shard_head,
        "neighbours": config.site.neighbours,
        "times_of": order.costs.source,
        "cut": list(layout.cut),
        "rank_of_stage": list(layout.rank_of_stage),
        "memory": list(layout.memory),
    }


def _training_seconds(layout: Layout, order: Order) -> float:
    """Seconds of the whole run."""
    return order.base.tokens_of_run(tokens_per_step(layout.config)) / layout.tokens_per_second


def show_layouts(found: Listing, shown: Sequence[Layout], order: Order, *, tokens: int) -> None:
    """Print layouts as a table, their step times beside that of the best synchronous one."""
    source = order.costs.source if order.times_known else None
    unit, size, form = _unit(shown)
    hours = "GPU-hours" if order.threads is None else "core-hours"
    columns = ["schedule", "stages", "pipelines", "micro-batches x size", "recompute", "fits"]
    columns += [f"{unit} per rank", "delay"]
    speeds = ["tokens/s", "x sync", LIKELY, "MFU", "bubble", "training", "step s", hours]
    columns += [] if source is None else speeds
    table = []
    for layout in shown:
        config = layout.config
        least, most = (form.format(bound(layout.rank_gb) / size) for bound in (min, max))
        fits = layout.memory_gb <= order.limit_gb
        cells = [
            layout.name,
            str(config.parallel.stages),
            str(config.parallel.data),
            f"{config.schedule.microbatches} x {config.train.microbatch_size}",
            config.train.recompute,
            "yes" if fits else f"no ({layout.memory_gb:.1f} > {order.limit_gb:.1f} GB)",
            least if least == most else f"{least} to {most}",
            str(layout.delay),
        ]
        table.append(cells if source is None else cells + _speeds(layout, found.synchronous, order))
    kind = "rank" if order.threads is not None or source is None else "GPU"
    first = len(found.pipelines) - found.further
    said = [f"the best {first} pipelines"] + ["the best by delay"] * bool(found.further)
    said += ["FSDP"] * bool(found.sharded)
    title = f"{shown[0].config.model.name} on {order.gpus} {kind}{'s' * (order.gpus > 1)}, "
    title += "" if source is None else f"times of {source}, "
    title += f"{tokens:,} tokens per step, {order.assumed}: {' and '.join(said)}"
    hidden = [hours, "step s", LIKELY, "MFU", "bubble", "training", "tokens/s", "micro-batches x size"]
    show_table(columns, table, title=title, fit=Fit(share=columns[1:], hide=hidden))


def _speeds(layout: Layout, synchronous: Layout | None, order: Order) -> list[str]:
    """The cells of a layout that tell its speed and cost."""
    seconds = _training_seconds(layout, order)
    ratio = synchronous and synchronous.step.seconds / layout.step.seconds
    speed = layout.tokens_per_second
    of_gpu = order.costs if isinstance(order.costs, Roofline) else None
    return [
        f"{speed:,.0f}",
        "-" if ratio is None else f"{ratio:.2f}",
        _likely(layout, synchronous, order),
        "-" if of_gpu is None else f"{of_gpu.mfu(layout.config, tokens_per_second=speed):.1%}",
        f"{layout.step.bubble:.1%}",
        _span(seconds),
        f"{layout.step.seconds:.3g}",
        amount(seconds / 3600 * order.gpus * (order.threads or 1)),
    ]


def _likely(layout: Layout, synchronous: Layout | None, order: Order) -> str:
    """The interval of the ratio of steps; of a layout with a delay, whose ratio decides."""
    if synchronous is None or not layout.delay or not isinstance(order.costs, Roofline):
        return "-"
    low, high = likely_ratio(synchronous, layout)
    return f"{low:.2f} to {high:.2f}"


def sentences(found: Listing, order: Order, *, tokens: int) -> list[str]:
    """What is left out, what FSDP loses, and what to use, of all layouts."""
    said = []
    if found.alike:
        said.append(
            f"{found.alike} layouts that take as long as one of these and differ from it in micro-batches "
            "and size alone are left out (--json has them)."
        )
    if found.sharded:
        said.append(_decision(found, order))
    elif order.with_sharded and order.gpus > 1 and isinstance(order.costs, Roofline):
        said.append(_without_sharded(order, tokens))
    return said


def _decision(found: Listing, order: Order) -> str:
    """What to use, in a sentence or two."""
    sharded, synchronous, late = found.sharded[0], found.synchronous, found.delayed
    assert synchronous is not None  # FSDP is
    kind = sharded.name.partition(",")[0].upper()
    lost = f"Here {kind} loses {sharded.lost:.1%} of its step to exchanges"
    if sharded.lost > 0.5:
        # Half as many GPUs compute for twice as long: only here may that be less.
        lost += " (fewer GPUs may be as fast: --map)"
    if late is None:
        return (
            f"{lost}. Use {synchronous.place}: no layout with a delay and room for error feedback is faster."
        )
    more = synchronous.step.seconds / late.step.seconds - 1
    low, high = (ratio - 1 for ratio in likely_ratio(synchronous, late))
    said = (
        f"{lost}; the best synchronous choice is {synchronous.place}. {late.place}, with "
        f"{late.config.optimizer.name}{_correction(found, late, order)}, pays if its delay of "
        f"{late.delay} costs fewer than {more:.1%} more steps (published runs say {low:.0%} to {high:.0%})"
    )
    if low <= 0:
        return f"{said}. The plan cannot tell whether it is faster: measure both (--as-template writes them)."
    return f"{said}; training tells (--as-template writes what decides it)."


def _correction(found: Listing, late: Estimate, order: Order) -> str:
    """The correction of a layout with a delay, or that the advised one fits."""
    if correction := chosen_correction(late.config):
        return f" and {correction[0].replace('-', ' ')} (docs/optimizers.md)"
    limit = order.limit_gb
    faster = [
        each
        for each in found.pipelines
        if each.delay == late.delay and each.step.seconds < late.step.seconds and not each.exceeds(limit)
    ]
    unlike = "" if all(has_room(each, limit_gb=limit) for each in faster) else ", unlike in faster rows"
    return f" (docs/optimizers.md; error feedback fits{unlike})"


def _without_sharded(order: Order, tokens: int) -> str:
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


def show_memory(layout: Layout, order: Order, *, title: str) -> None:
    """Print what each rank of a layout holds, by kind."""
    unit, size, form = _unit([layout])
    print()
    context = ", beside CUDA's context" if order.threads is None and order.times_known else ""
    limit = f" (limit {order.limit_gb:.1f} GB{context})" if math.isfinite(order.limit_gb) else ""
    kinds = [name for name in layout.memory[0] if any(rank_bytes[name] for rank_bytes in layout.memory)]
    rows = []
    for rank, (held, total) in enumerate(zip(layout.memory, layout.rank_gb, strict=True)):
        # Shards of the head are stages without blocks, behind the others.
        of_stages = zip(layout.cut, layout.rank_of_stage, strict=False)
        blocks = " + ".join(str(blocks) for blocks, holder in of_stages if holder == rank)
        rows.append(
            [
                str(rank),
                blocks,
                form.format(total / size),
                *(form.format(held[name] / 1e9 / size) for name in kinds),
            ]
        )
    show_table(["rank", "blocks", "all", *kinds], rows, title=f"{title}, {unit} per rank{limit}")


def _unit(layouts: Sequence[Layout]) -> tuple[str, float, str]:
    """The unit of memory that suits these layouts, in 10^9 bytes, and how a number of it is written."""
    return ("MB", 1e-3, "{:,.0f}") if max(each.memory_gb for each in layouts) < 1 else ("GB", 1.0, "{:,.2f}")


def _span(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if seconds < most * size:
            return f"{seconds / size:.3g} {unit}" if seconds >= 0.01 else "< 0.01 s"
    return f"{seconds / 86400:,.3g} days" if seconds < 1e3 * 86400 else f"{seconds / 86400:,.0f} days"


def map_title(order: Order) -> str:
    """The title of a map."""
    model = order.base.config.model.name
    return f"{model}, times of {order.costs.source}, {order.assumed}"


def point_record(point: Point, order: Order) -> dict[str, Any]:
    """The numbers of a point of a map, for JSON."""
    numbers: dict[str, Any] = {
        "gpus": point.gpus,
        "tokens_per_step": point.tokens_per_step,
        "fastest": point.fastest,
    }
    synchronous = point.found.synchronous
    for kind, layout in point.layouts.items():
        numbers[kind] = None
        if layout is not None:
            likely = None
            if synchronous is not None and kind != "larger batch" and isinstance(order.costs, Roofline):
                likely = list(likely_ratio(synchronous, layout))
            limit = max(layout.losses, key=layout.losses.__getitem__)
            own = {"ratio": point.ratio(kind), "likely": likely, "losses": layout.losses, "limit": limit}
            numbers[kind] = record(layout, order) | own
    return numbers


def show_map(points: Sequence[Point], order: Order) -> None:
    """Print a map as a table."""
    columns = ["tokens per step", "GPUs", "fastest", "synchronous", "delay 1", "r", "GB", "2 x batch"]
    columns += ["more delay", "FSDP loses"]
    rows = []
    for point in points:
        delayed, more = (point.layouts[kind] for kind in KINDS[1:])
        ratio, larger = point.ratio("delay 1"), point.ratio("larger batch")
        sharded = next(iter(point.found.sharded), None)
        rows.append(
            [
                f"{point.tokens_per_step:,}",
                f"{point.gpus:,}",
                point.fastest or "none fits",
                _short(point.found.synchronous),
                _short(delayed),
                "-" if ratio is None else f"{ratio:.2f}",
                "-" if delayed is None else f"{delayed.memory_gb:.1f}",
                "-" if larger is None else f"{larger:.2f}",
                _short(more) if more is None else f"{_short(more)}, delay {more.delay}",
                "-" if sharded is None else f"{sharded.lost:.0%}",
            ]
        )
    show_table(
        columns,
        rows,
        title=f"{map_title(order)}, at most {order.limit_gb:.1f} GB",
        fit=Fit(share=["tokens per step"], hide=["FSDP loses", "more delay", "GB", "2 x batch"]),
    )
    context = order.base.config.data.context
    of_fsdp = 100 * WITHIN[kind_of(pipeline=False, context=context, gpus=0)]
    show_line(
        "Layouts: schedule, stages x pipelines. r: time of the best synchronous step, FSDP among them, over "
        "that of delay 1, which pays where it needs fewer than r times the steps; published runs say "
        f"within {100 * WITHIN['schedules']:.0f} % where that is a pipeline, {of_fsdp:.0f} % where it is "
        "FSDP (asyncpp plan has intervals). "
        "GB: of delay 1. 2 x batch: tokens per second of the best synchronous layout with twice the tokens "
        "per step, over those of this one. More delay is shown where it is faster than the others. "
        "FSDP loses: to its exchanges, of its step."
    )


def _short(layout: Layout | None) -> str:
    if layout is None:
        return "-"
    parallel = layout.config.parallel
    return f"{layout.name} {parallel.stages} x {parallel.data}" if layout.cut else layout.name


def show_balance(config: RunConfig, found: Sequence[Balance]) -> None:
    """Print how evenly stages of whole blocks, and cuts within blocks, share the work."""
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
        title=f"{config.model.name}, sequences of {config.data.context} tokens: mean multiply-adds of a rank "
        "over those of the largest",
    )


def show_measured_balance(run: str, found: MeasuredBalance) -> None:
    """Print how even a run's ranks were, and the cut for ranks that are as fast."""
    rows = zip(found.seconds, found.speed, found.expected, strict=True)
    show_table(
        ["rank", "ms per micro-batch", "speed", "ms expected"],
        [
            [str(rank), f"{1e3 * took:.3g}", f"{speed:.2f}", f"{1e3 * expected:.3g}"]
            for rank, (took, speed, expected) in enumerate(rows)
        ],
        title=f"{run}: what each rank computes for a micro-batch; speed: multiply-adds per second over the "
        "mean of the ranks",
    )
    cut, even = (f"[{', '.join(map(str, each))}]" for each in (found.cut, found.even_cut))
    show_line(
        f"Mean over the slowest rank: {found.efficiency:.3f} with parallel.cut: {cut}; expected "
        f"{found.expected_efficiency:.3f} with parallel.cut: {even}, whose memory is not checked here "
        "(asyncpp sweep --list does)."
    )
    if found.costs is not None:
        show_line(
            f"Proportions of forward and of the two halves of a backward: schedule.costs: {found.costs}"
        )
