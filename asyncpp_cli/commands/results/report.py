"""`asyncpp report`: tables, figures and pages of what the runs of experiments measured."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.completion import experiments, models_and_templates
from asyncpp_cli.errors import UserError
from asyncpp_cli.numbers import finite
from asyncpp_cli.report.formats.catalogue import FORMATS

if TYPE_CHECKING:
    ReportFormat = str
else:
    ReportFormat = StrEnum("ReportFormat", {name.upper(): name for name in FORMATS})
    """Output format of a report, a name of `FORMATS`."""

_NARROWEST, _WIDEST = 2.0, 14.0


def report(
    experiments: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR", help="Folders of experiments to report together.", autocompletion=experiments
        ),
    ],
    output_format: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="Output format; json: a list of cells; steps: every step, as Parquet; html: one page.",
        ),
    ] = "table",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write into this file instead of standard output.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="KEY,..", help="Configuration keys that identify the rows.")
    ] = None,
    cols: Annotated[
        str | None, typer.Option(metavar="KEY,..", help="Configuration keys whose values become columns.")
    ] = None,
    value: Annotated[
        str, typer.Option(metavar="NAME,..", help="With --cols: values to show, by JSON key.")
    ] = "val_loss",
    target: Annotated[
        float | None,
        typer.Option(
            parser=finite, metavar="LOSS", help="Show steps, tokens and time to this validation loss."
        ),
    ] = None,
    best_over: Annotated[
        str | None, typer.Option(metavar="KEY,..", help="Keep the best value of these keys for each arm.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the plots to this folder as SVG, PDF and PNG.")
    ] = None,
    figure_width: Annotated[
        float,
        typer.Option(
            parser=finite,
            metavar="INCHES",
            help="Width of the plots; a column of a two-column page is about 3.3.",
        ),
    ] = 5.5,
    assets: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --format html: the charts' script (5 MB) in this folder, for several pages.",
        ),
    ] = None,
    caption: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Caption of --format latex, in LaTeX.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="NAME", help="Label of --format latex; default: tab:EXPERIMENT.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="MODEL",
            help="Carry the verdict's steps over to this model, at a planned speed.",
            autocompletion=models_and_templates,
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", min=2, help="With --for: number of GPUs.")] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(metavar="T", min=1, help="With --for: tokens per step; default: 524,288.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --for: the GPU; default: h100.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh while runs go on, until Ctrl-C.")] = False,
) -> None:
    """Show loss, gap to synchronous training, and throughput.

    Also delay, bubble and memory of every cell, averaged over seeds.

    Works while runs are training. Failed, missing and damaged runs are shown with the reason.
    """
    from asyncpp_cli.threads import need_polars

    need_polars()
    from asyncpp_cli.report.analysis.transfer import DEVICE, Target
    from asyncpp_cli.report.build import ReportOptions, watch_report, write_report
    from asyncpp_cli.report.tables.pivot import keys_of

    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; give the name of a file")
    wanted = FORMATS[output_format]
    if out is None and wanted.files is not None:
        raise UserError(f"--format {output_format} needs a file: --out FILE")
    if not _NARROWEST <= figure_width <= _WIDEST:
        raise UserError(f"--figure-width {figure_width:g}: accepted: {_NARROWEST:g} to {_WIDEST:g} (inches)")
    given = {"--assets": assets, "--caption": caption, "--label": label}
    for name, each in FORMATS.items():
        for option in each.options:
            if each is not wanted and given[option] is not None:
                raise UserError(f"{option} is for --format {name}")
    if label is not None and not re.fullmatch(r"[A-Za-z0-9:._-]+", label):
        raise UserError(f"--label {label}: accepted: letters, digits and : . _ -")
    if caption is not None and caption.count("{") != caption.count("}"):
        raise UserError("--caption: its braces do not match")
    if (model is None) != (gpus is None):
        raise UserError("--for MODEL and --gpus N are given together")
    if model is None and (tokens_per_step is not None or device is not None):
        raise UserError("--tokens-per-step and --device are for --for MODEL")
    target_run = None
    if model is not None and gpus is not None:
        target_run = Target(model=model, gpus=gpus, tokens_per_step=tokens_per_step, device=device or DEVICE)
    options = ReportOptions(
        folders=tuple(experiments),
        output_format=output_format,
        out=out,
        rows=tuple(keys_of(rows, option="--rows")),
        cols=tuple(keys_of(cols, option="--cols")),
        values=value,
        target=target,
        best_over=tuple(keys_of(best_over, option="--best-over")),
        figures=figures,
        figure_width=figure_width,
        assets=assets,
        caption=caption,
        label=label,
        target_run=target_run,
    )
    if watch:
        watch_report(options, to_terminal=sys.stdout.isatty())
    else:
        write_report(options)
