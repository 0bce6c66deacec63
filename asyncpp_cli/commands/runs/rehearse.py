"""`asyncpp rehearse`: every rank of every cell at its real size, with fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.base.console import to_write
from asyncpp_cli.commands.arguments import ExperimentOrRun, MoreRuns

if TYPE_CHECKING:
    from asyncpp_cli.planner.rehearsal import ComparedRank
    from asyncpp_cli.runs.run_folder import Run
    from stages.config.run_config import RunConfig


def rehearse(
    folder: ExperimentOrRun,
    runs: MoreRuns = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=0, help="Only this rank of the pipeline, or process of fsdp; can be repeated."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cuda|cpu",
            help="Kind of device that is pretended; default: as planned, cuda unless site.device is cpu.",
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write all numbers, a row for each rank.",
            dir_okay=False,
            callback=to_write,
        ),
    ] = None,
) -> None:
    """Perform a few steps of every rank at its real size, with fake tensors: nothing is allocated.

    Finds, without a GPU: tensors on the wrong device, types and shapes that an operator refuses, waits of the
    host for its device during training, float64 tensors, and memory that differs from the plan. Takes seconds
    to a minute of one core for each rank. Cells that differ in seeds and rates alone are rehearsed once.
    Of fsdp and hsdp one process is, that which holds most: all do the same.

    Exit code 0 if nothing is found, 1 if something is.
    """
    from asyncpp_cli.base.console import say
    from asyncpp_cli.base.errors import UserError
    from asyncpp_cli.base.outputs import is_stream
    from asyncpp_cli.base.progress import shown
    from asyncpp_cli.planner.rehearsal import NOT_REHEARSED, fullest_of, ranks_of, write_csv
    from asyncpp_cli.planner.rehearsal import rehearse as rehearsed
    from asyncpp_cli.runs.experiment_folder import runs_named

    if device not in (None, "cuda", "cpu"):
        raise UserError(f"--device is {device}; accepted: cuda, cpu")
    experiment, named = runs_named(folder, runs)
    kinds = _kinds(named or experiment.runs, device=device)
    good, records = True, []
    for place, alike in enumerate(kinds, 1):
        name, config = alike[0]
        there, chosen = ranks_of(config), rank or fullest_of(config)
        outside = [number for number in chosen if number not in there]
        if outside:
            raise UserError(f"--rank {outside[0]}: {name} has ranks 0 to {there[-1]}")
        further = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
        compared = []
        with shown(f"{name} ({place} of {len(kinds)} cells)", total=len(chosen)) as advance:
            for each in rehearsed(config, device=config.site.device, ranks=chosen):
                say(f"{name}: rank {each.number}, {each.found.seconds:.0f} s")
                advance(1)
                compared.append(each)
                records.append(each.record(config))
                if csv is not None and not is_stream(csv):  # after each: a long rehearsal may be ended
                    write_csv(csv, records)
        good &= _show(f"{name}{further}", compared)
    if csv is not None and is_stream(csv):
        write_csv(csv, records)
    say("Not rehearsed: " + "; ".join(NOT_REHEARSED) + ".")
    raise typer.Exit(0 if good else 1)


def _kinds(runs: Sequence[Run], *, device: str | None) -> list[list[tuple[str, RunConfig]]]:
    """Ids and configurations of runs, in groups that differ in seeds and rates alone."""
    from asyncpp_cli.experiment.run_data import config_to_train
    from asyncpp_cli.planner.cells import estimate_key, planned_machine
    from stages.config.run_config import changed

    kinds: dict[str, list[tuple[str, RunConfig]]] = {}
    for run in runs:
        config = planned_machine(config_to_train(run), source=run.id).config
        if device is not None:
            config = changed(config, {"site.device": device})
        kinds.setdefault(estimate_key(config), []).append((run.id, config))
    return list(kinds.values())


def _show(title: str, compared: list[ComparedRank]) -> bool:
    """Print a cell's ranks and what was found of them; returns whether nothing was."""
    from asyncpp_cli.base.console import show_line, show_table
    from asyncpp_cli.planner.memory import GB

    rows, lines = [], dict[str, list[int]]()
    notes = dict.fromkeys(note for each in compared for note in each.found.notes)
    for each in compared:
        found, planned = each.found, each.planned
        rows.append(
            [
                str(each.number),
                ", ".join(map(str, found.stages)),
                f"{found.peak_bytes / GB:.2f}",
                "" if planned is None else f"{sum(planned.values()) / GB:.2f}",
                "" if each.difference is None else f"{each.difference:+.1%}",
                "" if not each.planned_flops else f"{each.flops / each.planned_flops:.3f}",
                str(sum(found.hot_waits.values())),
                str(sum(found.faults.values()) - sum(found.hot_waits.values())),
            ]
        )
        for fault, times in found.faults.items():
            text = f"{fault.where}: {fault.what} (during {fault.phase}, {times} times)"
            lines.setdefault(text, []).append(each.number)
        if not each.is_as_planned or each.keeps_less:
            kinds = "; ".join(
                f"{kind} {gb:.3g} of {plan:.3g}"
                for kind, gb, plan in each.by_kind()
                if abs(gb - plan) >= 0.01 * found.peak_bytes / GB
            )
            if each.keeps_less:
                notes[
                    f"rank {each.number} keeps less than planned where blocks are compiled, in GB: {kinds}"
                ] = None
            else:
                lines.setdefault(f"memory differs from the plan, in GB: {kinds}", []).append(each.number)
    columns = ["rank", "stages", "peak GB", "planned GB", "difference", "FLOPs/planned", "waits", "faults"]
    show_table(columns, rows, title=title)
    for line, ranks in lines.items():
        show_line(f"rank {', '.join(map(str, ranks))}: {line}")
    for note in notes:
        show_line(f"note: {note}")
    return not lines
