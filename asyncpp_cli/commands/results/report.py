"""`asyncpp report`: tables, figures and pages of what the runs of experiments measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import to_write
from asyncpp_cli.base.errors import INTERRUPTED, UserError
from asyncpp_cli.base.outputs import is_stream
from asyncpp_cli.commands.arguments import with_options
from asyncpp_cli.report.formats.options import FORMATS, ReportOptions

_NARROWEST, _WIDEST = 2.0, 14.0


@with_options
def report(
    experiments: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="Folders of experiments to report together."),
    ],
    options: ReportOptions,
) -> None:
    """Show loss, gap to synchronous training, and throughput.

    Also delay, bubble and memory of every cell, averaged over seeds.

    Works while runs are training. Failed, missing and damaged runs are shown with the reason.
    """
    from asyncpp_cli.base.errors import need_polars

    need_polars()
    from asyncpp_cli.report.build import watch_report, write_report

    if options.watch:
        options = _of_rewritten_page(options, experiments[0])
    _check(options)
    if not options.watch:
        write_report(experiments, options)
        return
    try:
        watch_report(experiments, options)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _of_rewritten_page(options: ReportOptions, first: Path) -> ReportOptions:
    """The options of a page that is rewritten: by default in the folder of the first experiment.

    Raises:
        UserError: options do not belong to such a page, or it has no experiment.
    """
    from asyncpp_cli.runs.experiment_folder import open_experiment

    if options.output_format not in ("table", "html"):
        raise UserError(f"--watch rewrites a page; --format {options.output_format}: accepted: html")
    if options.out is not None and is_stream(options.out):
        raise UserError(f"--watch rewrites a page; --out {options.out} is no file")
    if options.watch_seconds <= 0:
        raise UserError(f"--watch-seconds {options.watch_seconds:g}: accepted: more than 0")
    out = options.out or open_experiment(first).folder / "report.html"
    return replace(options, output_format="html", out=out)


def _check(options: ReportOptions) -> None:
    """Refuse options that do not belong together.

    Raises:
        UserError: there are such.
    """
    if options.out is not None and options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder; give the name of a file")
    # With --figures or --assets the file may lie in a folder that these make.
    if options.figures is None and options.assets is None:
        to_write(options.out)
    if options.value is not None and options.cols is None:
        raise UserError("--value names the values of columns: --cols KEY,.. is missing")
    if options.out is None and options.format.needs_file:
        raise UserError(f"--format {options.output_format} needs a file: --out FILE")
    if not _NARROWEST <= options.figure_width <= _WIDEST:
        raise UserError(
            f"--figure-width {options.figure_width:g}: accepted: {_NARROWEST:g} to {_WIDEST:g} (inches)"
        )
    for name, other in FORMATS.items():
        for option in other.options if other is not options.format else ():
            if getattr(options, option.removeprefix("--").replace("-", "_")) is not None:
                raise UserError(f"{option} is for --format {name}")
    if options.label is not None and not re.fullmatch(r"[A-Za-z0-9:._-]+", options.label):
        raise UserError(f"--label {options.label}: accepted: letters, digits and : . _ -")
    if options.caption is not None and options.caption.count("{") != options.caption.count("}"):
        raise UserError("--caption: its braces do not match")
    if (options.model is None) != (options.gpus is None):
        raise UserError("--for MODEL and --gpus N are given together")
    if options.model is None and (options.tokens_per_step is not None or options.device is not None):
        raise UserError("--tokens-per-step and --device are for --for MODEL")
