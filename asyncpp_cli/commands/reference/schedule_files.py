"""`asyncpp schedule check | draw | import | export`: programs in files."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import finite, say, tell
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import with_options
from asyncpp_cli.schedule_tools.options import (
    Geometry,
    Microbatches,
    Name,
    Names,
    Out,
    Stages,
    Steps,
    Times,
)


class Form(StrEnum):
    """File format of a written program."""

    PROGRAM = "program"
    CSV = "csv"
    TRACE = "trace"


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Program file, or CSV of torch's form.")],
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

    program = read_program(file, steps=1)
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


@with_options
def draw(
    names: Names,
    out: Annotated[Path, typer.Option(metavar="FILE", help="SVG, PNG or PDF file to write.")],
    geometry: Geometry,
    times: Times,
    steps: Steps = 3,
    until: Annotated[
        float | None, typer.Option(parser=finite, metavar="T", help="End the picture at this time.")
    ] = None,
) -> None:
    """Draw schedules one below the other, coloured by weight version. Needs the extra `plot`."""
    from asyncpp_cli.base.atomic_files import drawing
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


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CLASS|FILE", help="Schedule class of torch (ZBVZeroBubble, DualPipeV, ...) or CSV file."
        ),
    ],
    stages: Stages = None,
    microbatches: Microbatches = None,
    chunks: Annotated[int, typer.Option(metavar="V", help="Stages per rank.")] = 1,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Steps of the program (default: as many as `compare` needs)."),
    ] = None,
    out: Out = None,
) -> None:
    """Write a schedule of torch.distributed.pipelining as a program file."""
    from asyncpp_cli.schedule_tools.programs import is_file, read_program, refuse_huge
    from schedules import ScheduleError
    from schedules.io.program_file import to_text
    from schedules.io.torch_lists import from_torch
    from schedules.simulate import steps_to_measure

    if is_file(source):
        if steps is None:
            one_step = read_program(Path(source), steps=1)
            steps = steps_to_measure(stages=one_step.num_stages, microbatches=one_step.microbatches)
        _write(to_text(read_program(Path(source), steps=steps)), out)
        return
    if stages is None or microbatches is None:
        raise UserError(f"--stages and --microbatches are missing: torch's {source} needs both")
    if steps is None:
        steps = steps_to_measure(stages=stages * chunks, microbatches=microbatches)
    refuse_huge(source, stages=stages * chunks, microbatches=microbatches, steps=steps)
    try:
        program = from_torch(source, stages=stages, microbatches=microbatches, chunks=chunks, steps=steps)
    except ScheduleError as error:
        raise UserError(str(error)) from error
    _write(to_text(program), out)


@with_options
def export(
    name: Name,
    geometry: Geometry,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of the program.")] = 1,
    form: Annotated[
        Form,
        typer.Option("--format", help="program, csv (torch's, synchronous only) or trace (for Perfetto)."),
    ] = Form.PROGRAM,
    out: Out = None,
) -> None:
    """Write a schedule as a program file, as torch's CSV, or as a Chrome trace.

    DIR/RUN instead of NAME, with --format trace: the last steps that the run measured, with its memory.
    """
    from asyncpp_cli.schedule_tools import programs as schedule_input
    from asyncpp_cli.schedule_tools.programs import CostOptions
    from schedules import ScheduleError
    from schedules.io.chrome_trace import chrome_trace
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
    schedule_input.refuse_untaken([name], geometry)
    program = schedule_input.program(name, geometry, steps=steps)
    if form is Form.PROGRAM:
        _write(to_text(program), out)
    elif form is Form.TRACE:
        trace = chrome_trace(schedule_input.timeline(program, CostOptions()), microseconds_per_unit=1e3)
        _write(json.dumps(trace) + "\n", out)
    else:
        try:
            _write(to_csv(program), out)
        except ScheduleError as error:
            raise UserError(str(error)) from error


def _is_run(name: str) -> bool:
    """Whether a name is DIR/RUN, with the beginning of an id for RUN."""
    from asyncpp_cli.schedule_tools.programs import is_file

    path = Path(name)
    return is_file(name) and not path.is_file() and (path.is_dir() or path.parent.is_dir())


def _write(text: str, file: Path | None) -> None:
    if file is None:
        sys.stdout.write(text)
        return
    from asyncpp_cli.base.atomic_files import write_output

    write_output(file, text.encode())
    say(f"Wrote {file}")
