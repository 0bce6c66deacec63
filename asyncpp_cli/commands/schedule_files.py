"""`asyncpp schedule check | draw | import | export`: programs from and into files."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.errors import UserError, doing
from asyncpp_cli.schedule_options import (
    Ahead,
    Backward,
    Chunks,
    Delay,
    Forward,
    Input,
    Interval,
    Jitter,
    Latency,
    Microbatches,
    Name,
    Names,
    Out,
    Seed,
    Stages,
    Steps,
    Weight,
)


class Form(StrEnum):
    """What a program is written as."""

    PROGRAM = "program"
    CSV = "csv"
    TRACE = "trace"


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A program file, or a CSV of torch's form.")],
    channel_capacity: Annotated[
        int | None,
        typer.Option(
            "--channel-capacity",
            min=1,
            help="Messages that a channel between two stages holds before its sender waits (default: any).",
        ),
    ] = None,
) -> None:
    """Verify a program written by hand: exit code 2 and a line for each thing that is wrong."""
    from asyncpp_cli.schedule_input import read_program
    from schedules import find_problems

    program = read_program(file, steps=1)
    problems = find_problems(program, channel_capacity=channel_capacity)
    for problem in problems:
        print(f"{file}: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(2)
    steps = f"{program.steps} step{'s' if program.steps > 1 else ''}"
    typer.echo(
        f"{file}: right ({program.schedule}, {program.num_stages} stages on {program.num_ranks} ranks, "
        f"{program.microbatches} micro-batches a step, {steps})"
    )


def draw(
    names: Names,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="An SVG, PNG or PDF file.")],
    stages: Stages = None,
    microbatches: Microbatches = None,
    steps: Steps = 3,
    chunks: Chunks = None,
    ahead: Ahead = None,
    delay: Delay = None,
    update_interval: Interval = None,
    forward: Forward = 1.0,
    backward: Backward = 2.0,
    input_half: Input = None,
    weight_half: Weight = None,
    latency: Latency = 0.0,
    jitter: Jitter = 0.0,
    seed: Seed = 0,
    until: Annotated[float | None, typer.Option("--until", metavar="T", help="Cut off at this time.")] = None,
) -> None:
    """Draw schedules below each other; colour is the weight version. Needs the extra `plot`."""
    from asyncpp_cli import schedule_input
    from asyncpp_cli.schedule_input import CostOptions, Geometry
    from schedules import ScheduleError, analyze
    from schedules.picture import draw as draw_picture

    geometry = Geometry(
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        ahead=ahead,
        delay=delay,
        update_interval=update_interval,
    )
    schedule_input.refuse_untaken(names, geometry)
    costs = CostOptions(
        forward=forward,
        backward=backward,
        input_half=input_half,
        weight_half=weight_half,
        latency=latency,
        jitter=jitter,
        seed=seed,
    )
    programs = [schedule_input.program(name, geometry, steps=steps) for name in names]
    titles = [
        f"{program.schedule}: {program.microbatches} micro-batches a step, "
        f"delay {max(analyze(program).delay_max)}"
        for program in programs
    ]
    timelines = [schedule_input.timeline(program, costs) for program in programs]
    try:
        with doing("written", out):
            draw_picture(timelines, titles=titles, file=out, until=until)
    except ScheduleError as error:
        raise UserError(str(error)) from error
    except ModuleNotFoundError as error:
        raise UserError(f"a picture needs {error.name}: pip install 'asyncpp[plot]'") from error
    print(f"Wrote {out}", file=sys.stderr)


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="CLASS|FILE", help="ZBVZeroBubble, DualPipeV, ... of torch, or a CSV file."),
    ],
    stages: Stages = None,
    microbatches: Microbatches = None,
    chunks: Annotated[int, typer.Option("--chunks", metavar="V", help="Stages a rank.")] = 1,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", min=1, help="Of the program; as many as `compare` needs."),
    ] = None,
    out: Out = None,
) -> None:
    """Write a schedule of torch.distributed.pipelining as a program file."""
    from asyncpp_cli.schedule_input import is_file, read_program
    from schedules import ScheduleError
    from schedules.program_file import to_text
    from schedules.simulate import steps_to_measure
    from schedules.torch_lists import from_torch

    if is_file(source):
        if steps is None:
            one = read_program(Path(source), steps=1)
            steps = steps_to_measure(stages=one.num_stages, microbatches=one.microbatches)
        _write(to_text(read_program(Path(source), steps=steps)), out)
        return
    if stages is None or microbatches is None:
        raise UserError(
            f"--stages and --microbatches say for which numbers torch's {source} is to be imported"
        )
    if steps is None:
        steps = steps_to_measure(stages=stages * chunks, microbatches=microbatches)
    try:
        program = from_torch(source, stages=stages, microbatches=microbatches, chunks=chunks, steps=steps)
    except ScheduleError as error:
        raise UserError(str(error)) from error
    _write(to_text(program), out)


def export(
    name: Name,
    stages: Stages = None,
    microbatches: Microbatches = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps of the program.")] = 1,
    chunks: Chunks = None,
    ahead: Ahead = None,
    delay: Delay = None,
    update_interval: Interval = None,
    form: Annotated[
        Form, typer.Option("--format", help="program; csv (torch's, synchronous only); trace (for Perfetto).")
    ] = Form.PROGRAM,
    out: Out = None,
) -> None:
    """Write a schedule as a program file, as torch's CSV, or as a Chrome trace."""
    from asyncpp_cli import schedule_input
    from asyncpp_cli.schedule_input import CostOptions, Geometry
    from schedules import ScheduleError
    from schedules.program_file import to_text
    from schedules.torch_lists import to_csv
    from schedules.trace import chrome_trace

    geometry = Geometry(
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        ahead=ahead,
        delay=delay,
        update_interval=update_interval,
    )
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


def _write(text: str, file: Path | None) -> None:
    if file is None:
        sys.stdout.write(text)
        return
    from asyncpp_cli.files import write_text

    write_text(file, text)
    print(f"Wrote {file}", file=sys.stderr)
