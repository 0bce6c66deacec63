"""The options of a report, which the command line and the Python API share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.base.console import finite


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a report is written."""

    writer: str
    """`module:function`, in this folder: from the report and its options to the text."""
    needs_file: bool = False
    """It is written to a file alone."""
    keeps_steps: bool = False
    """It shows every step of the runs."""
    options: tuple[str, ...] = ()
    """Options that this format alone takes."""

    def text(self, report: Any, options: Any) -> str:
        """The report, a `tables.document.Report`, with its `formats.options.ReportOptions`."""
        module, _, function = self.writer.partition(":")
        text: str = getattr(import_module(f"{__package__}.{module}"), function)(report, options)
        return text


FORMATS: Mapping[str, Format] = {
    "table": Format(writer="text:to_text"),
    "markdown": Format(writer="text:to_markdown"),
    "latex": Format(writer="latex:to_latex", options=("--caption", "--label")),
    "csv": Format(writer="records:to_csv"),
    "json": Format(writer="records:to_json"),
    "html": Format(writer="page:to_page", needs_file=True, keeps_steps=True, options=("--assets",)),
}


if TYPE_CHECKING:
    ReportFormat = str
else:
    ReportFormat = StrEnum("ReportFormat", {name.upper(): name for name in FORMATS})
    """Output format of a report, a name of `FORMATS`."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of `asyncpp report`; each is a field and its option of the command line."""

    output_format: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="Output format; json: a list of cells; html: one page.",
        ),
    ] = "table"
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write into this file instead of standard output.")
    ] = None
    rows: Annotated[
        str | None, typer.Option(metavar="KEY,..", help="Configuration keys that identify the rows.")
    ] = None
    cols: Annotated[
        str | None, typer.Option(metavar="KEY,..", help="Configuration keys whose values become columns.")
    ] = None
    value: Annotated[
        str | None,
        typer.Option(metavar="NAME,..", help="With --cols: values to show, by JSON key; default: val_loss."),
    ] = None
    target: Annotated[
        float | None,
        typer.Option(
            parser=finite, metavar="LOSS", help="Show steps, tokens and time to this validation loss."
        ),
    ] = None
    best_over: Annotated[
        str | None, typer.Option(metavar="KEY,..", help="Keep the best value of these keys for each arm.")
    ] = None
    against: Annotated[
        str | None,
        typer.Option(metavar="ARM", help="Also show each loss minus that of this arm, by words of its name."),
    ] = None
    sort: Annotated[bool, typer.Option("--sort", help="Order the rows by loss, the best first.")] = False
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the plots to this folder as SVG, PDF and PNG.")
    ] = None
    figure_width: Annotated[
        float,
        typer.Option(
            parser=finite,
            metavar="INCHES",
            help="Width of the plots; a column of a two-column page is about 3.3.",
        ),
    ] = 5.5
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Rewrite the page (--format html; default: DIR/report.html) every 30 s until all runs have "
            "ended; where it is open it reloads itself.",
        ),
    ] = False
    watch_seconds: Annotated[float, typer.Option(parser=finite, hidden=True)] = 30.0
    """Seconds from one version of the page to the next."""
    assets: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --format html: the charts' script (5 MB) in this folder, for several pages.",
        ),
    ] = None
    caption: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Caption of --format latex, in LaTeX.")
    ] = None
    label: Annotated[
        str | None, typer.Option(metavar="NAME", help="Label of --format latex; default: tab:EXPERIMENT.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="MODEL|TEMPLATE",
            help="Carry the verdict's steps over to this model, at a planned speed.",
        ),
    ] = None
    gpus: Annotated[int | None, typer.Option(metavar="N", min=2, help="With --for: number of GPUs.")] = None
    tokens_per_step: Annotated[
        int | None,
        typer.Option(metavar="T", min=1, help="With --for: tokens per step; default: a template's, 524,288."),
    ] = None
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --for: the GPU; default: a template's, h100.")
    ] = None

    @property
    def format(self) -> Format:
        return FORMATS[self.output_format]

    @property
    def curves(self) -> bool:
        """Whether the report shows curves, which need every step of the runs."""
        return self.format.keeps_steps or self.figures is not None

    @property
    def file(self) -> Path:
        """`out` of a format that is written to files alone."""
        assert self.out is not None
        return self.out
