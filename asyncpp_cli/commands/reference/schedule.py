"""`asyncpp schedule`: show, compare, verify and convert pipeline schedules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import say, show_line
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import with_options
from asyncpp_cli.commands.reference import schedule_files
from asyncpp_cli.schedule_tools.options import (
    Bandwidth,
    Chunks,
    EvenSteps,
    Geometry,
    Json,
    MessageSize,
    Name,
    Names,
    Norm,
    Reduction,
    Steps,
    Times,
    UpdateTime,
)

app = typer.Typer(
    help="Show, compare, check, draw and convert pipeline schedules.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command()(schedule_files.check)
app.command()(schedule_files.draw)
app.command("import")(schedule_files.import_)
app.command()(schedule_files.export)


@app.command("list")
def list_(
    stages: Annotated[int, typer.Option(metavar="P", help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="M", help="Micro-batches per step.")] = 8,
    chunks: Chunks = None,
    as_json: Json = False,
) -> None:
    """List all schedules with their properties for P ranks and M micro-batches (forward 1, backward 2)."""
    from asyncpp_cli.schedule_tools import programs as schedule_input
    from asyncpp_cli.schedule_tools.programs import CostOptions
    from schedules import FAMILY

    geometry = Geometry(stages=stages, microbatches=microbatches, chunks=chunks)
    rows = []
    for name in FAMILY:
        try:
            rows += schedule_input.comparison([name], geometry, CostOptions())
        except UserError as error:
            if name == next(iter(FAMILY)):
                raise
            say(f"{name} is left out: {error}")
    schedule_input.note_delay(list(FAMILY), geometry)
    for row in rows:
        schedule = FAMILY[row["schedule"]]
        row["synchronous"], row["description"] = schedule.synchronous, schedule.description
    if as_json:
        _print_json(rows)
        return
    from asyncpp_cli.schedule_tools.output import show_comparison

    show_comparison(rows)
    for row in rows:
        show_line(f"{row['schedule']}: {row['description']}")


@app.command()
@with_options
def show(
    name: Name,
    geometry: Geometry,
    steps: Steps = 3,
    first_step: Annotated[int, typer.Option(metavar="K", min=0, help="First step to show.")] = 0,
    as_json: Json = False,
) -> None:
    """Show a schedule as a Gantt chart (forward 1, backward 2), with delay and memory of every stage.

    With --shard-head, S takes 2 and T 1.
    """
    from asyncpp_cli.schedule_tools import output as schedule_output
    from asyncpp_cli.schedule_tools import programs as schedule_input
    from asyncpp_cli.schedule_tools.programs import CostOptions
    from schedules import analyze

    schedule_input.refuse_untaken([name], geometry)
    program = schedule_input.program(name, geometry, steps=steps, first_step=first_step)
    schedule_input.note_delay([name], geometry)
    analysis = analyze(program)
    if as_json:
        _print_json(
            {
                "schedule": program.schedule,
                "stages": program.loss_stage + 1,
                "head_shards": program.head_shards,
                "microbatches": program.microbatches,
                "update_interval": program.update_interval,
                "steps": program.steps,
                "first_step": program.first_step,
                "rank_of_stage": program.rank_of_stage,
                "initial_versions": program.initial_versions,
                "final_versions": program.final_versions,
                "ranks": [[str(action) for action in actions] for actions in program.actions],
                "analysis": schedule_output.analysis_data(analysis),
            }
        )
        return
    last_step = program.first_step + program.steps - 1
    show_line(
        f"{program.schedule}: {schedule_output.described_stages(program)}, "
        f"{program.microbatches} micro-batches per step, steps {program.first_step} to {last_step}"
    )
    costs = CostOptions(head=float(program.head_shards))
    schedule_output.print_chart(schedule_input.timeline(program, costs))
    print()
    schedule_output.show_analysis(program, analysis)


@app.command()
@with_options
def compare(
    names: Names,
    geometry: Geometry,
    times: Times,
    steps: EvenSteps = None,
    update: UpdateTime = 0.0,
    reduction: Reduction = 0.0,
    norm: Norm = 0.0,
    message_size: MessageSize = 0.0,
    bandwidth: Bandwidth = None,
    costs_of: Annotated[
        Path | None, typer.Option(metavar="DIR/RUN", help="Use the computing times that this run measured.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare schedules under one cost model: bubble, time per step, delay and memory.

    Times are in any one unit, for a rank's whole share of the model. With --costs-of they are in seconds, and
    the run gives the numbers of stages and micro-batches unless you do.
    """
    from asyncpp_cli.schedule_tools import programs as schedule_input
    from asyncpp_cli.schedule_tools.programs import CostOptions

    measured = None
    if costs_of is not None:
        computing = (times.forward, times.backward, times.input_half, times.weight_half, update)
        if computing != (1.0, 2.0, None, None, 0.0):
            raise UserError(
                "--costs-of gives the computing times: leave out --forward, --backward, --update, ..."
            )
        from asyncpp_cli.schedule_tools.measured_costs import measured_run

        measured = measured_run(costs_of)
        geometry = replace(
            geometry,
            stages=measured.stages if geometry.stages is None else geometry.stages,
            microbatches=measured.microbatches if geometry.microbatches is None else geometry.microbatches,
        )
    schedule_input.refuse_untaken(names, geometry)
    costs = CostOptions(
        **vars(times),
        update=update,
        reduction=reduction,
        norm=norm,
        transfer=schedule_input.transfer_time(message_size, bandwidth),
        measured=None if measured is None else measured.times,
    )
    rows = schedule_input.comparison(names, geometry, costs, steps=steps)
    schedule_input.note_delay(names, geometry, costs.block)
    if as_json:
        _print_json(rows)
        return
    from asyncpp_cli.schedule_tools.output import show_comparison

    show_comparison(rows)


def _print_json(content: object) -> None:
    typer.echo(json.dumps(content))
