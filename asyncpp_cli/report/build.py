"""Builds a report from experiment folders and writes it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.base.atomic_files import real_folder
from asyncpp_cli.base.console import say
from asyncpp_cli.base.outputs import write_output
from asyncpp_cli.base.progress import shown
from asyncpp_cli.report.analysis.aggregate import aggregate_best, compare_all
from asyncpp_cli.report.analysis.answer import by_loss
from asyncpp_cli.report.analysis.transfer import Target, Transfer
from asyncpp_cli.report.analysis.verdict import Verdict
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.formats.text import to_table
from asyncpp_cli.report.load.experiments import load
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.report.tables.pivot import keys_of
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.tune.plan import read_plan
from asyncpp_cli.tune.result import Tuning
from asyncpp_cli.tune.standing import standings


def write_report(folders: Sequence[Path], options: ReportOptions) -> None:
    """Write the report.

    Raises:
        UserError: a folder is not an experiment, or a file cannot be written.
    """
    experiments = [open_experiment(folder) for folder in folders]
    report = build_report(experiments, options, keep_steps=options.curves)
    _write(options, report)


def watch_report(folders: Sequence[Path], options: ReportOptions) -> None:
    """Write the page again and again, until all runs have ended; the last version no longer reloads itself.

    Raises:
        UserError: a folder is not an experiment, or a file cannot be written.
    """
    announced = False
    while True:
        experiments = [open_experiment(folder) for folder in folders]
        report = build_report(experiments, options, keep_steps=True)
        if not report.unfinished:
            break
        _write(options, report, silent=announced)
        if not announced:
            say(f"Rewritten every {options.watch_seconds:g} s until all runs have ended; Ctrl-C ends it")
        announced = True
        time.sleep(options.watch_seconds)
    _write(replace(options, watch=False), report)
    say("All runs have ended")


def build_report(experiments: Sequence[Experiment], options: ReportOptions, *, keep_steps: bool) -> Report:
    """The report of these experiments."""
    rows, cols = keys_of(options.rows, option="--rows"), keys_of(options.cols, option="--cols")
    tunings = [
        Tuning(plan=plan, arms=standings(each, plan, scheduler=None))
        for each in experiments
        if (plan := read_plan(each.folder)) is not None
    ]
    runs, remarks = load(experiments, keep_steps=keep_steps)
    behind = _left_behind(tunings)
    runs = [run for run in runs if run.id not in behind]
    cells, notes, choices = aggregate_best(
        runs,
        keys=[*rows, *cols],
        best_over=keys_of(options.best_over, option="--best-over"),
        tuned=list(dict.fromkeys(key for tuning in tunings for key in tuning.plan.keys)),
        target=options.target,
    )
    if options.against is not None:
        compare_all(cells, options.against)
    if options.sort:
        cells = by_loss(cells)
    problems = [problem for run in runs for problem in run.problems]
    report = Report(
        name=" + ".join(dict.fromkeys(experiment.name for experiment in experiments)),
        cells=cells,
        notes=[*notes, *remarks, *problems],
        choices=choices,
        rows=rows,
        cols=cols,
        values=options.value or "val_loss",
        tunings=tunings,
    )
    report.transfers = _transfers(report.verdicts, options)
    return report


def _transfers(found: Sequence[Verdict], options: ReportOptions) -> list[Transfer]:
    """The verdicts carried over to the run of `--for`."""
    if options.model is None or options.gpus is None:
        return []
    from asyncpp_cli.report.analysis.planned import transfers

    target = Target(
        model=options.model,
        gpus=options.gpus,
        tokens_per_step=options.tokens_per_step,
        device=options.device,
    )
    with shown(f"planning {options.model}"):
        return transfers(found, target)


def _left_behind(tunings: Sequence[Tuning]) -> set[str]:
    """Runs of tunings that are not of their arm's best candidate."""
    return {
        run
        for tuning in tunings
        for each in tuning.arms
        for compared in each.candidates
        if compared is not each.leading
        for run in compared.candidate.runs
    }


def _write(options: ReportOptions, report: Report, *, silent: bool = False) -> None:
    if options.figures is not None:
        from asyncpp_cli.report.formats.figures import write_figures

        write_figures(report, folder=real_folder(options.figures), width=options.figure_width)
        if not silent:
            say(f"Wrote the figures into {options.figures}")
    if options.out is None and options.output_format == "table" and sys.stdout.isatty():
        from asyncpp_cli.base.console import console

        to_table(report, console=console())
        return
    text = options.format.text(report, options)
    if options.out is None:
        sys.stdout.write(text)
        return
    if options.assets is not None:
        from asyncpp_cli.report.formats.page import write_assets

        write_assets(real_folder(options.assets))
    write_output(options.out, text.encode())
    if not silent:
        say(f"Wrote {options.out}")
