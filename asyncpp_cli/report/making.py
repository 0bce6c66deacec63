"""From folders to a report in the form that is wanted, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.errors import UserError
from asyncpp_cli.files import write_bytes
from asyncpp_cli.report.aggregate import aggregate_best
from asyncpp_cli.report.document import Report
from asyncpp_cli.report.latex import to_latex
from asyncpp_cli.report.load import Loader
from asyncpp_cli.report.markdown import to_markdown
from asyncpp_cli.report.pivot import pivot_rows, values_of
from asyncpp_cli.report.records import csv_text, to_csv, to_json, to_parquet
from asyncpp_cli.report.terminal import to_table, to_text
from asyncpp_cli.runs import Experiment, open_experiment

SECONDS_BETWEEN_LOOKS = 3.0
"""With `--watch`."""

_GOING_ON = ("running", "pending")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `asyncpp report` was asked for; the names are those of its options."""

    folders: tuple[Path, ...]
    output_format: str
    out: Path | None
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    values: str
    target: float | None
    best_over: tuple[str, ...]
    figures: Path | None
    figure_width: float

    @property
    def curves(self) -> bool:
        """Whether the course of the runs is shown, and not only what came of them."""
        return self.output_format in ("html", "steps") or self.figures is not None


def make(wanted: Wanted) -> None:
    """Write the report once.

    Raises:
        UserError: a folder is no experiment, or a file cannot be written.
    """
    experiments = [open_experiment(folder) for folder in wanted.folders]
    _write(wanted, report_of(experiments, wanted, Loader(keep_steps=wanted.curves)))


def watch_and_make(wanted: Wanted, *, to_terminal: bool) -> None:
    """Write the report until no run is going on or waiting to, or until Ctrl-C.

    Args:
        wanted: the report.
        to_terminal: whether standard output is a terminal, where each report takes the place of the last.
    """
    loader = Loader(keep_steps=wanted.curves)
    try:
        while True:
            # Opened each time: cells may be added to an experiment while it runs.
            report = report_of([open_experiment(folder) for folder in wanted.folders], wanted, loader)
            if wanted.out is None and to_terminal:
                sys.stdout.write("\x1b[2J\x1b[3J\x1b[H")
            _write(wanted, report)
            if not any(run.state in _GOING_ON for cell in report.cells for run in cell.runs):
                return
            sys.stdout.flush()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    except KeyboardInterrupt:
        return


def report_of(experiments: Sequence[Experiment], wanted: Wanted, loader: Loader) -> Report:
    """The report of these experiments."""
    runs, remarks = loader.load(experiments)
    cells, notes, choices = aggregate_best(
        runs, keys=[*wanted.rows, *wanted.cols], best_over=wanted.best_over, target=wanted.target
    )
    problems = [problem for run in runs for problem in run.problems]
    return Report(
        name=" + ".join(dict.fromkeys(experiment.name for experiment in experiments)),
        cells=cells,
        notes=[*notes, *remarks, *problems],
        choices=choices,
        rows=wanted.rows,
        cols=wanted.cols,
        values=wanted.values,
    )


def _write(wanted: Wanted, report: Report) -> None:
    if wanted.figures is not None:
        from asyncpp_cli.report.figures import write_figures

        write_figures(report, folder=wanted.figures, width=wanted.figure_width)
        print(f"Wrote the figures into {wanted.figures}", file=sys.stderr)
    if wanted.out is None and wanted.output_format == "table" and sys.stdout.isatty():
        from asyncpp_cli.console import console

        to_table(report, console=console())
    elif wanted.output_format == "html":
        assert wanted.out is not None
        _write_page(report, wanted.out)
    elif wanted.out is None:
        sys.stdout.write(_TEXTS[wanted.output_format](report))
    elif wanted.output_format == "parquet":
        _write_file(wanted.out, to_parquet(report.cells))
    elif wanted.output_format == "steps":
        from asyncpp_cli.report.step_table import to_step_table

        _write_file(wanted.out, to_step_table(report.cells))
    else:
        _write_file(wanted.out, _TEXTS[wanted.output_format](report).encode())


def _csv(report: Report) -> str:
    if not report.cols:
        return to_csv(report.cells)
    values = values_of(report.values, report.cells)
    return csv_text(pivot_rows(report.cells, rows=report.rows, cols=report.cols, values=values))


_TEXTS: dict[str, Callable[[Report], str]] = {
    "table": to_text,
    "markdown": to_markdown,
    "latex": to_latex,
    "csv": _csv,
    "json": lambda report: to_json(report.cells),
}


def _write_page(report: Report, file: Path) -> None:
    """The page, and beside it the curves that it shows, whole."""
    from asyncpp_cli.report.page import to_page
    from asyncpp_cli.report.step_table import is_step_table, to_step_table

    beside = file.with_name(f"{file.name.removesuffix('.html')}.steps.parquet")
    if beside.exists() and not is_step_table(beside):
        # The command line names the page alone, so this may be somebody's data.
        raise UserError(
            f"--out {file}: {beside} is in the way and no table of steps; move it, or name another"
        )
    _write_file(beside, to_step_table(report.cells))
    _write_file(file, to_page(report, beside=beside.name, folder=file.absolute().parent).encode())


def _write_file(file: Path, content: bytes) -> None:
    write_bytes(file, content)
    print(f"Wrote {file}", file=sys.stderr)
