"""`asyncpp plan`: ranks pipeline layouts of a model by memory and step time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.base.console import finite, to_write
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import AllowCode, template_words

if TYPE_CHECKING:
    from asyncpp_cli.planner.base_config import Base
    from asyncpp_cli.planner.costs.devices import Device
    from asyncpp_cli.planner.costs.profile_costs import Measured
    from asyncpp_cli.planner.tables import Order

What = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|TEMPLATE",
        help="Template of a model or an experiment, or its file; with --balance also a run, DIR/PREFIX.",
        autocompletion=template_words,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, as in optimizer=muon or data.context=4096."),
]
Gpus = Annotated[int, typer.Option(metavar="N", min=1, help="Total number of GPUs.")]
Memory = Annotated[
    float | None,
    typer.Option(parser=finite, metavar="GB", help="Memory of a GPU, 10^9 bytes; default: the device's."),
]
SiteName = Annotated[str | None, typer.Option(metavar="NAME", help="Site profile that names its GPUs.")]
DeviceName = Annotated[
    str | None, typer.Option(metavar="NAME", help="GPU for the estimated times; a model's default: h100.")
]
Bandwidth = Annotated[
    float | None,
    typer.Option(parser=finite, metavar="GBIT", help="Network of each GPU, Gbit/s; default: the device's."),
]
NodeBandwidth = Annotated[
    float | None,
    typer.Option(parser=finite, metavar="GBIT", help="Network of each node, which its GPUs share, Gbit/s."),
]
GpusPerNode = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="GPUs of a node; default: the site's `gpus_per_node`, or 8."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Use the times of a file that --measure wrote, not estimates."),
]
MeasureTo = Annotated[
    Path | None,
    typer.Option(
        "--measure",
        metavar="FILE",
        help="Measure the model's parts on this machine first, write their times, and use them.",
        callback=to_write,
    ),
]
Sizes = Annotated[
    list[int] | None,
    typer.Option(
        "--microbatch-size",
        metavar="N",
        min=1,
        help="With --measure: sequences per micro-batch; can be repeated.",
    ),
]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="With --measure: measurements of each part.")]
Tokens = Annotated[
    list[int] | None,
    typer.Option(
        metavar="T",
        min=1,
        help="Tokens per step; default: the template's, or 524,288. With --map: can be repeated; "
        "default: half, 1, 2 and 4 times that.",
    ),
]
AsMap = Annotated[
    bool,
    typer.Option(
        "--map",
        help="Best synchronous and asynchronous layouts, over GPUs (powers of two up to N) and tokens.",
    ),
]
AsBalance = Annotated[
    bool,
    typer.Option(
        "--balance",
        help="How evenly the model is cut into 4, 8 and 16 stages, by multiply-adds; of a run, by the "
        "times of its ranks, and the cut that evens them out.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --map: draw it, too (SVG, PNG, PDF); needs the extra `plot`.",
        callback=to_write,
    ),
]
Schedules = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this schedule; can be repeated.")
]
Rows = Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to show.")]
Row = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="The one to show by rank, and as settings; default: the recommended one."
    ),
]
AsTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a template for asyncpp sweep that decides whether the recommended layout pays; with "
        "--row one that trains that layout.",
        callback=to_write,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all layouts as a JSON list, best first.")]


def plan(
    context: typer.Context,
    what: What,
    changes: Changes = None,
    allow_code: AllowCode = None,
    gpus: Gpus = 1,
    memory: Memory = None,
    site: SiteName = None,
    device: DeviceName = None,
    bandwidth: Bandwidth = None,
    node_bandwidth: NodeBandwidth = None,
    gpus_per_node: GpusPerNode = None,
    profile: ProfileFile = None,
    measure_to: MeasureTo = None,
    microbatch_sizes: Sizes = None,
    repeats: Repeats = 20,
    tokens_per_step: Tokens = None,
    as_map: AsMap = False,
    as_balance: AsBalance = False,
    out: Out = None,
    schedule: Schedules = None,
    rows: Rows = 10,
    row: Row = None,
    as_template: AsTemplate = None,
    as_json: AsJson = False,
) -> None:
    """Show which layouts fit, their memory and speed, best first.

    A layout is a schedule with its stages, pipelines, micro-batches, their size, and recomputation;
    "interleaved-1f1b x 2" has two stages on each rank.
    Times are estimates from data sheets, for comparing layouts, unless --measure or --profile is given.
    --measure times forward and backward of embedding, block and head, and their optimizer step, on the GPU if
    there is one, else on `site.threads` CPU threads.
    """
    import schedules
    from stages.config.keys import unknown

    _check_used(context)
    if len(tokens_per_step or ()) > 1 and not as_map:
        raise UserError("several --tokens-per-step are accepted with --map")
    for name in schedule or ():
        if name not in schedules.NAMES:
            raise UserError(f"--schedule: {unknown(name, schedules.NAMES)}")
    if as_balance:
        _balance(what, changes or [], allow_code or (), as_json=as_json)
        return
    base = _base(what, changes or [], allow_code or ())
    measured = _measured(base, profile, measure_to, sizes=microbatch_sizes or [], repeats=repeats)
    links = _Links(bandwidth, node_bandwidth, gpus_per_node)
    order = _order(base, gpus, site=site, device=device, measured=measured, memory=memory, links=links)
    if schedule:
        order = replace(order, names=schedule)
    if as_map:
        _map(order, tokens_per_step, as_json=as_json, out=out)
        return
    tokens = tokens_per_step[0] if tokens_per_step else base.tokens_per_step
    if as_json:
        _all_as_json(order, tokens)
        return
    _list(order, tokens, rows=rows, row=row, template=_Template(as_template, what, changes or []))


def _check_used(context: typer.Context) -> None:
    """Refuse options that what is asked for does not use: they would change nothing, unnoticed."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name}
    given = {name for name in options if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    of_rows = given & {"rows", "row", "as_template"}
    of_model = {"what", "changes", "allow_code", "as_balance", "as_json"}
    for mode, unused in {"as_balance": given - of_model, "as_map": of_rows, "as_json": of_rows}.items():
        if mode in given and unused:
            raise UserError(f"{options[min(unused)]}: leave out {options[mode]}, which does not use it")
    for name, mode in {"out": "as_map", "microbatch_sizes": "measure_to", "repeats": "measure_to"}.items():
        if name in given and mode not in given:
            raise UserError(f"{options[name]} is accepted with {options[mode]}")


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=1))


def _base(what: str, changes: Sequence[str], allow_code: Sequence[str]) -> Base:
    """The run to plan.

    Raises:
        UserError: its costs are unknown.
    """
    from asyncpp_cli.planner.base_config import base_of

    base = base_of(what, changes, allow_code=allow_code)
    if base.config.model.factory is not None:
        raise UserError(
            f"{what}: model.factory: the costs of a user's own model are unknown; train it to measure them"
        )
    return base


def _balance(what: str, changes: Sequence[str], allow_code: Sequence[str], *, as_json: bool) -> None:
    """Print how evenly stages share the work of a model, or of a run as it measured it."""
    from asyncpp_cli.planner.balance import balances, balances_of_run
    from asyncpp_cli.planner.tables import show_balance, show_measured_balance
    from asyncpp_cli.runs.experiment_folder import run_is_named

    if not run_is_named(what):
        base = _base(what, changes, allow_code)
        found = list(balances(base.config))
        if as_json:
            _print_json([each._asdict() for each in found])
        else:
            show_balance(base.config, found)
        return
    if changes:
        raise UserError(f"--balance of a run takes no {changes[0]}: it was trained with its own settings")
    run, measured = balances_of_run(Path(what))
    if as_json:
        _print_json(measured.record())
    else:
        show_measured_balance(run, measured)


def _measured(
    base: Base, profile: Path | None, measure_to: Path | None, *, sizes: Sequence[int], repeats: int
) -> Measured | None:
    """Measured times, if some are asked for."""
    if measure_to is None:
        from asyncpp_cli.planner.costs.profile_costs import read_profile

        return None if profile is None else read_profile(profile)
    from asyncpp_cli.planner.costs.measure import measure

    if profile is not None:
        raise UserError("--measure and --profile both give times: leave one out")
    return measure(base.config, measure_to, microbatch_sizes=sizes, repeats=repeats)


@dataclass(frozen=True)
class _Links:
    """What connects GPUs, as the options say; Gbit/s."""

    bandwidth: float | None
    node_bandwidth: float | None
    gpus_per_node: int | None


def _order(
    base: Base,
    gpus: int,
    *,
    site: str | None,
    device: str | None,
    measured: Measured | None,
    memory: float | None,
    links: _Links,
) -> Order:
    """What is planned, on which machine."""
    from asyncpp_cli.planner.cells import DEFAULT_GPU, planned_machine
    from asyncpp_cli.planner.costs.roofline import Roofline
    from asyncpp_cli.planner.tables import Order
    from asyncpp_cli.sites.profile import find_site
    from stages.config.run_config import changed

    if memory is not None and not memory > 0:
        raise UserError(f"--memory {memory:g}: accepted: a positive number, 10^9 bytes")
    profile = None if site is None else find_site(site)
    machine = planned_machine(
        base.config,
        device=device,
        site=profile,
        profile=measured,
        default=DEFAULT_GPU if base.is_model else None,
    )
    limit = machine.limit_gb if memory is None else memory
    costs, given = machine.costs, (links.bandwidth, links.node_bandwidth, links.gpus_per_node)
    if isinstance(costs, Roofline):
        costs = Roofline(_linked(costs.device, links))
    elif given != (None, None, None):
        raise UserError("--bandwidth changes estimated times: leave out --profile and --measure")
    config = machine.config
    if memory is not None:
        config = changed(config, {"site.memory_gb": memory})
    return Order(
        base=replace(base, config=config),
        gpus=gpus,
        costs=costs,
        limit_gb=math.inf if limit is None else limit,
        times_known=machine.times_known,
    )


def _linked(device: Device, links: _Links) -> Device:
    """The device with the links that the options set."""
    for option, value in (("bandwidth", links.bandwidth), ("node-bandwidth", links.node_bandwidth)):
        if value is not None and not value > 0:
            raise UserError(f"--{option} {value:g}: accepted: more than 0")
    if links.bandwidth is not None and links.node_bandwidth is not None:
        raise UserError("--bandwidth is of each GPU, --node-bandwidth of each node: leave one out")
    if links.gpus_per_node is not None:
        device = device.in_nodes(links.gpus_per_node)
    if links.bandwidth is not None:
        device = replace(device, network_gbs=links.bandwidth / 8, shares_adapter=False)
    if links.node_bandwidth is not None:
        of_gpu = links.node_bandwidth / 8 / device.gpus_per_node
        device = replace(device, network_gbs=of_gpu, shares_adapter=True)
    return device


def _map(
    order: Order,
    tokens: Sequence[int] | None,
    *,
    as_json: bool,
    out: Path | None,
) -> None:
    """Print the map, as a table or as JSON, and draw it into `out`."""
    from asyncpp_cli.base.console import say
    from asyncpp_cli.base.outputs import drawing, refusing_pictures
    from asyncpp_cli.planner import decision, tables
    from asyncpp_cli.sites.resources import cores_here

    if order.gpus < 2:
        raise UserError(f"--map --gpus {order.gpus}: accepted: 2 or more")
    if not order.times_known:
        raise UserError("--map needs times: name a GPU (--device, --site) or a --profile")
    if out is not None:
        with refusing_pictures():
            decision.check_picture(out)
    asked = tokens or [int(factor * order.base.tokens_per_step) for factor in decision.TOKENS]
    points = decision.decision_map(
        order.base.config,
        gpus=order.gpus,
        tokens_per_step=sorted(set(asked)),
        costs=order.costs,
        limit_gb=order.limit_gb,
        names=order.names,
        with_sharded=order.with_sharded,
        processes=cores_here(),
    )
    if out is not None:
        with drawing(out) as picture:
            decision.draw(points, title=tables.map_title(order), file=picture)
    if as_json:
        _print_json([tables.point_record(point, order) for point in points])
    else:
        tables.show_map(points, order)
    if out is not None:
        say(f"Wrote {out}")


def _all_as_json(order: Order, tokens: int) -> None:
    """Print all layouts, best first."""
    from asyncpp_cli.planner.fsdp import best_sharded
    from asyncpp_cli.planner.rank import best_first
    from asyncpp_cli.planner.shared import Shared
    from asyncpp_cli.planner.tables import among, record

    asked: dict[str, Any] = {"gpus": order.gpus, "tokens_per_step": tokens, "limit_gb": order.limit_gb}
    base = order.base.config
    found = list(best_first(base, Shared(order.costs), names=order.names, **asked))
    sharded = best_sharded(base, costs=order.costs, **asked) if order.with_sharded else []
    _print_json([record(each, order) for each in among(sharded, found, order)])


@dataclass(frozen=True)
class _Template:
    """A template to write: its file, if one is asked for, and what was planned."""

    file: Path | None
    what: str
    changes: Sequence[str]


def _list(order: Order, tokens: int, *, rows: int, row: int | None, template: _Template) -> None:
    """Print the best layouts, what to use, and of one of them the memory and the settings."""
    from asyncpp_cli.base.console import say
    from asyncpp_cli.base.progress import shown as progress
    from asyncpp_cli.planner import tables
    from asyncpp_cli.planner.costs.devices import DEVICES
    from asyncpp_cli.planner.listing import listed
    from asyncpp_cli.planner.shared import Shared
    from stages.data.documents import computed_share

    base = order.base
    with progress("comparing layouts"):
        found = listed(
            base.config,
            Shared(order.costs),
            gpus=order.gpus,
            tokens_per_step=tokens,
            names=order.names,
            limit_gb=order.limit_gb,
            rows=rows,
            with_sharded=order.with_sharded,
        )
    shown = tables.among(found.sharded, found.pipelines, order)
    number = row or 1 + shown.index(found.recommended)
    if number > len(shown):
        raise UserError(
            f"--row {row}: accepted: 1 to {len(shown)}, the layouts that are shown (--rows shows more)"
        )
    chosen = shown[number - 1]
    if template.file is not None and chosen.exceeds(order.limit_gb):
        which = "no layout of these fits" if row is None else f"row {row} does not fit"
        raise UserError(f"--as-template: {which} {order.limit_gb:.1f} GB")
    if base.note:
        say(base.note)
    if base.config.data.document_mask:
        share = computed_share(base.config.data)
        say(f"Attention within documents is {share:.0%} of causal attention in this data; times count that.")
    tables.show_layouts(found, shown, order, tokens=tokens)
    for sentence in tables.sentences(found, order, tokens=tokens):
        say(sentence)
    tables.show_memory(chosen, order, title=f"Row {number}: {chosen.place}")
    if chosen.exceeds(order.limit_gb):
        say("It does not fit, so its settings are not shown.")
        return
    _offer(chosen, found if row is None else None, order, tokens, number=number, template=template)
    if not order.times_known:
        say(
            f"No times are shown, since {template.what} names no GPU: --device {'|'.join(DEVICES)} estimates "
            "them, and --profile FILE takes those of this machine (asyncpp plan --measure). The order is "
            f"that of {order.costs.source}."
        )


def _offer(chosen: Any, found: Any, order: Order, tokens: int, *, number: int, template: _Template) -> None:
    """Print a layout as settings, and write the template: of that layout, or of `found`, what decides."""
    import shlex

    from asyncpp_cli.base.console import quoted, say
    from asyncpp_cli.base.outputs import write_output
    from asyncpp_cli.planner import templates
    from asyncpp_cli.planner.costs.roofline import Roofline

    settings = templates.settings_of(chosen, order.base)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    say(f"Row {number} as settings: {shlex.join(f'{key}={text}' for key, text in texts.items())}")
    if template.file is None:
        return
    other = None if found is None else templates.rival(found)
    source = order.costs.device if isinstance(order.costs, Roofline) else None
    device = source if order.times_known else None
    text = templates.template_text(
        template.what, order.base, template.changes, chosen, other=other, tokens=tokens, device=device
    )
    write_output(template.file, text.encode())
    name = quoted(template.file)
    say(f"Wrote {template.file}: asyncpp sweep {name} --list")
    if other is not None:
        # Measured times are not of a GPU that the steps could be carried over to.
        target = "" if source is None else f" --for {name} --gpus {order.gpus}"
        target += f" --device {source.name}" if source is not None and device is None else ""
        sweep = f"asyncpp sweep {name} 'matrix.seed=[0,1]' --out E"
        words = f"{sweep}; asyncpp launch E; asyncpp report E{target}"
        say(f"It decides whether the delay pays, by two seeds: {words}")
