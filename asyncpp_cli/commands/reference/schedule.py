"""`asyncpp schedule`: show, compare, verify and convert pipeline schedules."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import finite, say, show_line, tell, to_write
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import with_options
from asyncpp_cli.schedule_tools.options import (
    AllTimes,
    Chunks,
    Geometry,
    Json,
    Name,
    Names,
    Out,
    SegmentSteps,
    ShardHead,
    Steps,
    Times,
)

app = typer.Typer(
    help="Show, compare, check, draw and convert pipeline schedules.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Form(StrEnum):
    """File format of a written program."""

    PROGRAM = "program"
    CSV = "csv"
    TRACE = "trace"


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Program file.")],
    channel_capacity: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Unread messages of a kind between two ranks before a sender waits (default: unlimited).",
        ),
    ] = None,
) -> None:
    """Verify a program file: prints a line per problem, and exits with code 2 if there is one."""
    from asyncpp_cli.schedule_tools.output import described_stages
    from asyncpp_cli.schedule_tools.programs import read_program
    from schedules import find_problems

    program = read_program(file)
    problems = find_problems(program, channel_capacity=channel_capacity)
    for problem in problems:
        say(f"{file}: {problem}")
    if problems:
        raise typer.Exit(2)
    steps = f"{program.steps} step{'s' if program.steps > 1 else ''}"
    tell(
        f"{file}: valid ({program.schedule}, {described_stages(program)}, "
        f"{program.microbatches} micro-batches per step, {steps})"
    )


@app.command()
@with_options
def draw(
    names: Names,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="SVG, PNG or PDF file to write.", callback=to_write)
    ],
    geometry: Geometry,
    times: Times,
    steps: Steps = 3,
    until: Annotated[
        float | None, typer.Option(parser=finite, metavar="T", help="End the picture at this time.")
    ] = None,
) -> None:
    """Draw schedules one below the other, coloured by weight version. Needs the extra `plot`."""
    from asyncpp_cli.base.outputs import drawing
    from asyncpp_cli.schedule_tools import programs as schedule_input
    from asyncpp_cli.schedule_tools.programs import CostOptions
    from schedules import analyze
    from schedules.io.picture import draw as draw_picture

    schedule_input.refuse_untaken(names, geometry)
    costs = CostOptions(**vars(times))
    programs = [schedule_input.program(name, geometry, steps=steps, costs=costs.block) for name in names]
    titles = [
        f"{program.schedule}: {program.microbatches} micro-batches per step, "
        f"delay {max(analyze(program).delay_max)}"
        for program in programs
    ]
    timelines = [schedule_input.timeline(program, costs) for program in programs]
    with drawing(out) as picture:
        draw_picture(timelines, titles=titles, file=picture, until=until)
    say(f"Wrote {out}")


@app.command()
@with_options
def export(
    name: Name,
    geometry: Geometry,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the program.")] = 1,
    form: Annotated[
        Form,
        typer.Option("--format", help="program, csv (torch's, synchronous only), or of a run trace."),
    ] = Form.PROGRAM,
    out: Out = None,
) -> None:
    """Write a schedule as a program file, or as torch's CSV.

    DIR/RUN instead of NAME, with --format trace: a Chrome trace (for Perfetto) of the last steps that the run
    measured, with its memory.
    """
    from asyncpp_cli.schedule_tools import programs as schedule_input
    from schedules import ScheduleError
    from schedules.io.program_file import to_text
    from schedules.io.torch_lists import to_csv

    if _is_run(name):
        from asyncpp_cli.report.load.measured_timeline import measured_trace
        from asyncpp_cli.runs.experiment_folder import run_at

        if form is not Form.TRACE:
            raise UserError(f"{name}: a run is exported with --format trace")
        if geometry != Geometry():
            raise UserError(f"{name} is a run: leave out --stages, --microbatches, ...")
        _write(json.dumps(measured_trace(run_at(Path(name)))) + "\n", out)
        return
    if form is Form.TRACE:
        raise UserError(f"{name} is no run (DIR/RUN); accepted for a schedule: --format program or csv")
    schedule_input.refuse_untaken([name], geometry)
    program = schedule_input.program(name, geometry, steps=steps)
    try:
        _write(to_text(program) if form is Form.PROGRAM else to_csv(program), out)
    except ScheduleError as error:
        raise UserError(str(error)) from error


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
            if not rows:  # the numbers are wrong for any schedule
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
    shard_head: ShardHead = False,
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
    program = schedule_input.program(
        name, geometry, steps=steps, first_step=first_step, shard_head=shard_head
    )
    schedule_input.note_delay([name], geometry, shard_head=shard_head)
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
                "analysis": vars(analysis),
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
    with suppress(UserError):
        # A file, or a schedule of one's own, may have no steady state.
        [row] = schedule_input.comparison([name], geometry, costs, shard_head=shard_head)
        show_line(schedule_output.described_step(row))
    schedule_output.show_analysis(program, analysis)


@app.command()
@with_options
def compare(
    names: Names,
    geometry: Geometry,
    times: AllTimes,
    steps: SegmentSteps = None,
    costs_of: Annotated[
        Path | None, typer.Option(metavar="DIR/RUN", help="Use the computing times that this run measured.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare schedules under one cost model: bubble, time per step, delay and memory.

    Times are in any one unit, for a rank's whole share of the model; a whole backward takes as long as its
    halves. With --costs-of they are in seconds, and the run gives the numbers of stages and micro-batches
    unless you do.
    """
    from asyncpp_cli.schedule_tools import programs as schedule_input
    from asyncpp_cli.schedule_tools.programs import CostOptions

    measured = None
    if costs_of is not None:
        if replace(times, latency=0.0, reduction=0.0) != AllTimes():
            raise UserError("--costs-of gives the computing times: leave out --forward, --update, ...")
        microbatches, measured = schedule_input.measured_run(costs_of)
        geometry = replace(
            geometry,
            stages=geometry.stages or len(measured.forward),
            microbatches=geometry.microbatches or microbatches,
        )
    schedule_input.refuse_untaken(names, geometry)
    costs = CostOptions(**vars(times), measured=measured)
    rows = schedule_input.comparison(names, geometry, costs, steps=steps)
    schedule_input.note_delay(names, geometry, costs.block)
    if as_json:
        _print_json(rows)
        return
    from asyncpp_cli.schedule_tools.output import show_comparison

    show_comparison(rows)


def _print_json(content: object) -> None:
    typer.echo(json.dumps(content))


def _is_run(name: str) -> bool:
    """Whether a name is DIR/RUN, with the beginning of an id for RUN."""
    from asyncpp_cli.schedule_tools.programs import is_file

    path = Path(name)
    return is_file(name) and not path.is_file() and (path.is_dir() or path.parent.is_dir())


def _write(text: str, file: Path | None) -> None:
    if file is None:
        sys.stdout.write(text)
        return
    from asyncpp_cli.base.outputs import write_output

    write_output(file, text.encode())
    say(f"Wrote {file}")
