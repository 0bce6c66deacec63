"""The formats of a report by name. Adding one takes a line in `FORMATS`; its writer is imported on use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpp_cli.base.atomic_files import is_stream
from asyncpp_cli.base.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.report.formats.options import ReportOptions
    from asyncpp_cli.report.tables.document import Report


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a report is written: as text, for a file or standard output, or as files alone."""

    text: Callable[[Report, ReportOptions], str] | None = None
    files: Callable[[Report, ReportOptions], Mapping[Path, bytes]] | None = None
    """The files of `--out` with their content, in the order of writing."""
    keeps_steps: bool = False
    """It shows every step of the runs."""
    options: tuple[str, ...] = ()
    """Options that this format alone takes."""


def _table(report: Report, _: ReportOptions) -> str:
    from asyncpp_cli.report.formats.terminal import to_text

    return to_text(report)


def _markdown(report: Report, _: ReportOptions) -> str:
    from asyncpp_cli.report.formats.markdown import to_markdown

    return to_markdown(report)


def _latex(report: Report, options: ReportOptions) -> str:
    from asyncpp_cli.report.formats.latex import to_latex

    return to_latex(report, caption=options.caption, label=options.label)


def _csv(report: Report, _: ReportOptions) -> str:
    from asyncpp_cli.report.formats.records import csv_text, to_csv
    from asyncpp_cli.report.tables.columns import value_columns
    from asyncpp_cli.report.tables.pivot import pivot_rows

    if not report.cols:
        return to_csv(report.cells)
    values = value_columns(report.values, report.cells)
    return csv_text(pivot_rows(report.cells, rows=report.rows, cols=report.cols, values=values))


def _json(report: Report, _: ReportOptions) -> str:
    from asyncpp_cli.report.formats.records import to_json

    return to_json(report.cells, report.tunings, report.transfers)


def _parquet(report: Report, options: ReportOptions) -> Mapping[Path, bytes]:
    from asyncpp_cli.report.formats.records import to_parquet

    return {options.file: to_parquet(report.cells)}


def _steps(report: Report, options: ReportOptions) -> Mapping[Path, bytes]:
    from asyncpp_cli.report.formats.step_table import to_step_table

    return {options.file: to_step_table(report.cells)}


def _html(report: Report, options: ReportOptions) -> Mapping[Path, bytes]:
    """The page, a Parquet file with every step of its curves, and the charts' script if pages share it."""
    from plotly.offline import get_plotlyjs

    from asyncpp_cli.report.formats.page import plotly_file, to_page
    from asyncpp_cli.report.formats.step_table import is_step_table, to_step_table

    file, assets = options.file, options.assets
    if is_stream(file):
        raise UserError(f"--out {file}: --format html writes a table of steps beside the page; name a file")
    steps_file = file.with_name(f"{file.name.removesuffix('.html')}.steps.parquet")
    if steps_file.exists() and not (steps_file.is_file() and is_step_table(steps_file)):
        # The command line does not name this file: it may be somebody's data.
        raise UserError(
            f"--out {file}: {steps_file} exists and is not a table of steps; move it, or choose another --out"
        )
    script = {}
    if assets is not None and not (assets / plotly_file()).exists():
        script = {assets / plotly_file(): get_plotlyjs().encode()}
    page = to_page(report, steps_file=steps_file.name, folder=file.absolute().parent, assets=assets)
    return {steps_file: to_step_table(report.cells), **script, file: page.encode()}


FORMATS: Mapping[str, Format] = {
    "table": Format(text=_table),
    "markdown": Format(text=_markdown),
    "latex": Format(text=_latex, options=("--caption", "--label")),
    "csv": Format(text=_csv),
    "json": Format(text=_json),
    "parquet": Format(files=_parquet),
    "steps": Format(files=_steps, keeps_steps=True),
    "html": Format(files=_html, keeps_steps=True, options=("--assets",)),
}
