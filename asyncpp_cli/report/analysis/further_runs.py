"""The runs that would answer a verdict: the setting that adds them, and the commands that train them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from asyncpp_cli.base.console import command
from asyncpp_cli.report.analysis.cells import FEW_SEEDS, CellResult
from asyncpp_cli.report.analysis.verdict import UNDECIDED, Verdict
from asyncpp_cli.runs.experiment_folder import whole_template

EXAMPLE = "`asyncpp sweep verdict --out verdict && asyncpp launch verdict` runs an experiment for it."
"""What to run where no arm was run in several lengths."""


def further_setting(verdict: Verdict) -> str | None:
    """The setting that adds the lengths or seeds that an unanswered verdict lacks; None if further runs would
    not answer it, or where the number of seeds can be told (`Verdict.seeds_to_decide`)."""
    if (missing := verdict.no_ratio) is not None:
        if missing.few_seeds:
            return further_seeds(verdict, FEW_SEEDS)
        steps = [sequences / verdict.delayed.batch for sequences in missing.lengths]
        return _further_lengths(verdict, steps) if steps else None
    if verdict.answer != UNDECIDED or verdict.steps is None or verdict.speed is None:
        return None
    if len(verdict.steps.seeds) < FEW_SEEDS:
        return further_seeds(verdict, FEW_SEEDS)
    run = sorted({cell.steps for cell in verdict.lengths})
    if verdict.steps.low is None:
        return _further_lengths(verdict, [run[0] / factor for factor in (2, math.sqrt(2))])
    if verdict.steps.high is None:
        return _further_lengths(verdict, [run[-1] * factor for factor in (math.sqrt(2), 2)])
    least, most = (ratio / verdict.speed.ratio for ratio in verdict.steps.by_curve)
    if least <= 1 <= most and least < most:
        # The shape of the curve leaves it open: a length at the loss itself is missing.
        return _further_lengths(
            verdict, [verdict.steps.ratio * verdict.synchronous.sequences / verdict.delayed.batch]
        )
    return None


def _further_lengths(verdict: Verdict, steps: Iterable[float]) -> str:
    """The setting that adds lengths to a verdict's experiment; those that it has stay in its matrix."""
    run = {cell.steps for cell in (*verdict.lengths, *verdict.synchronous_lengths)}
    return f"matrix.train.steps=[{','.join(map(str, sorted(run | set(map(math.ceil, steps)))))}]"


def further_seeds(verdict: Verdict, count: int) -> str:
    """The setting that gives a verdict's experiment so many seeds."""
    return seeds_setting((*verdict.lengths, *verdict.synchronous_lengths), count)


def seeds_setting(cells: Iterable[CellResult], count: int) -> str:
    """The setting that gives an experiment so many seeds; those that it has stay in its matrix."""
    seeds = sorted({seed for cell in cells for seed in cell.losses})
    further = range(seeds[-1] + 1, seeds[-1] + 1 + count - len(seeds))
    return f"matrix.seed=[{','.join(map(str, [*seeds, *further]))}]"


def how_to_train(verdict: Verdict, setting: str | None) -> str:
    """The commands that train the runs which are not complete or, of complete ones, what `setting` adds."""
    if verdict.unfinished or setting is None:
        setting = None
    elif setting.startswith("matrix.train.steps") and verdict.is_branch:
        return f"Extend the trunk (asyncpp extend) to the lengths of {setting}."
    return sweep_and_launch(verdict, setting)


def sweep_and_launch(verdict: Verdict, setting: str | None) -> str:
    """The commands that add `setting` to a verdict's experiment and launch it; None: that launch what is not
    complete."""
    folder = experiment_of(verdict)
    if folder is None:
        return f"`{setting or 'asyncpp launch'}`."
    if setting is None:
        launches = [launching(verdict, each) for each in verdict.unfinished_in or [folder]]
        return f"`{' && '.join(launches)}`"
    sweep = command("sweep", whole_template(folder), setting, "--out", folder)
    return f"`{sweep} && {launching(verdict, folder)}`"


def in_further_lengths(verdict: Verdict) -> str:
    """The commands that train what an experiment of one length lacks: its own runs are the middle length."""
    folder = experiment_of(verdict)
    if folder is None:
        return EXAMPLE
    if verdict.delayed.chosen:
        # The experiment's template would train all that they were chosen among.
        keys = " and ".join(verdict.delayed.chosen)
        return (
            f"Train each arm with its own {keys}, which overrides of a template set, in three lengths "
            "(matrix.train.steps), on seeds that it was not chosen on."
        )
    steps, out = verdict.delayed.steps, folder.with_name(f"{folder.name}-lengths")
    lengths = f"matrix.train.steps=[{max(1, steps // 2)},{2 * steps}]"
    sweep = command("sweep", whole_template(folder), lengths, "--out", out)
    return (
        f"`{sweep} && {launching(verdict, out)}` trains half and twice the steps; then "
        f"`{command('report', folder, out)}` answers it, with the runs that are here."
    )


def experiment_of(verdict: Verdict) -> Path | None:
    """The experiment of the delayed arm; None for runs that are not in a folder."""
    return next((run.folder.parents[1] for run in verdict.delayed.runs if run.folder is not None), None)


def launching(verdict: Verdict, folder: Path) -> str:
    """The command that launches an experiment where the arm's runs were. A profile that is a path is left
    out: it runs commands, and whoever wrote the folder need not be whom the reader trusts."""
    runs = [run for cell in (verdict.delayed, *verdict.lengths) for run in cell.runs]
    sites = [run.site for run in runs if run.site and Path(run.site).name == run.site]
    return command("launch", folder, *(["--site", sites[0]] if sites else []))
