"""`asyncpp report`: what the runs of an experiment measured."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.errors import UserError


class Format(StrEnum):
    """What a report is written as."""

    TABLE = "table"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


def report(
    experiment: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    output_format: Annotated[
        Format, typer.Option("--format", help="What to write; json is a list of cells.")
    ] = Format.TABLE,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write into this file instead of standard output."),
    ] = None,
) -> None:
    """Show loss, gap to synchronous training, throughput, delay and bubble of every cell, seeds averaged.

    Works while runs go on. Failed, missing and unreadable runs are shown with the reason.
    """
    from rich.console import Console

    from asyncpp_cli.report import render
    from asyncpp_cli.report.aggregate import aggregate
    from asyncpp_cli.report.load import load
    from asyncpp_cli.runs import open_experiment

    opened = open_experiment(experiment)
    cells, notes = aggregate(load(opened))
    problems = [problem for cell in cells for run in cell.runs for problem in run.problems]
    made = render.Report(name=opened.name, cells=cells, notes=[*notes, *problems])
    if out is None and output_format is Format.TABLE and sys.stdout.isatty():
        render.to_table(made, console=Console())
        return
    write = {
        Format.TABLE: render.to_text,
        Format.MARKDOWN: render.to_markdown,
        Format.CSV: render.to_csv,
        Format.JSON: render.to_json,
    }[output_format]
    text = write(made)
    if out is None:
        sys.stdout.write(text)
    else:
        _write_file(out, text)


def _write_file(file: Path, text: str) -> None:
    from asyncpp_cli.files import write_text

    if file.is_dir():
        raise UserError(f"--out {file}: a folder; give the name of a file")
    try:
        write_text(file, text)
    except OSError as error:
        raise UserError(f"--out {file}: cannot be written ({error.strerror})") from error
    print(f"Wrote {file}", file=sys.stderr)
