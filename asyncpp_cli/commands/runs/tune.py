"""`asyncpp tune`: gives every arm of a template the same budget to choose settings."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import AllowCode, Changes, template_words, with_options
from asyncpp_cli.launch.common.options import LaunchOptions, TrainOptions

if TYPE_CHECKING:
    from asyncpp_cli.tune.plan import Plan
    from asyncpp_cli.tune.tuning import Planned


@with_options
def tune(
    template: Annotated[
        str,
        typer.Argument(
            metavar="TEMPLATE|DIR",
            help="Shipped template or a file; or the folder of a tuning, to go on with it.",
            autocompletion=template_words,
        ),
    ],
    changes: Changes = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="LOW:HIGH, LOW:HIGH:log or [A,B,C]: what to tune; may be repeated.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the experiment.")] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", min=2, max=10_000, help="Values of each range; with a seed, points.")
    ] = 8,
    search_seed: Annotated[
        int | None, typer.Option(metavar="N", help="Draw the points at random; default: a grid of them.")
    ] = None,
    eta: Annotated[
        int, typer.Option(metavar="N", min=2, help="One in N candidates goes on from each rung.")
    ] = 2,
    rungs: Annotated[
        str, typer.Option(metavar="SHARE,..", help="Where to compare, as shares of all steps.")
    ] = "0.125,0.25",
    grid: Annotated[bool, typer.Option("--grid", help="Train every candidate to the end.")] = False,
    site: Annotated[str, typer.Option(metavar="NAME", help="Site profile, as in launch.")] = "local",
    allow_code: AllowCode = None,
    promote: Annotated[bool, typer.Option("--promote", hidden=True)] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show runs, rungs and steps; write and train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    *,
    options: TrainOptions,
) -> None:
    """Choose settings for every arm of a template, each with the same budget.

    All arms try the same points. Each arm halves its candidates: all train to the first rung, the best half
    by validation loss to the next, and so on to the end. A candidate goes on from its checkpoint, so no step
    is trained twice, and those that stay behind are kept as paused runs.

    Killed at any point, the same command goes on, and so does `asyncpp tune DIR`. `asyncpp report DIR` shows
    each arm at its best.
    """
    from asyncpp_cli.tune.plan import Question, read_plan
    from asyncpp_cli.tune.tuning import go_on, planned, write_tuning

    folder = Path(template)
    if folder.is_dir() and read_plan(folder) is not None:
        if changes or over or out is not None:
            raise UserError(f"{folder} is a tuning to go on with: it takes no settings, --over or --out")
    else:
        question = Question(
            template=template,
            changes=tuple(changes or ()),
            over=tuple(over or ()),
            samples=samples,
            search_seed=search_seed,
            eta=eta,
            rungs=() if grid else _shares(rungs),
        )
        if dry_run:
            _show_planned(planned(question, allow_code=allow_code or ()), as_json=as_json)
            return
        if out is None:
            raise UserError("--out DIR is missing: the experiment's folder (or --dry-run, to see the budget)")
        write_tuning(question, out=out, allow_code=allow_code or ())
        folder = out
    if dry_run:
        _show_result(folder, as_json=as_json)
        return
    code = go_on(folder, LaunchOptions(site=site, **vars(options)), promoting=promote)
    _show_result(folder, as_json=as_json)
    raise typer.Exit(code)


def _show_planned(made: Planned, *, as_json: bool) -> None:
    """Print what a tuning would train, and how long it is expected to take on this machine, if known."""
    from asyncpp_cli.base.console import say
    from asyncpp_cli.launch.expected import expected_line
    from asyncpp_cli.tune.plan import expected_steps

    _show_plan(made.plan, as_json=as_json)
    steps = expected_steps(made.plan)
    configs = [
        replace(each.config, train=replace(each.config.train, steps=steps[each.cell.id]))
        for each in made.cells
        if each.cell.id in steps
    ]
    if line := expected_line(configs):
        say(line)


def _shares(text: str) -> tuple[float, ...]:
    """The shares of `--rungs`.

    Raises:
        UserError: they are not numbers between 0 and 1 that increase.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (0.0,)
    if not all(low < high for low, high in pairwise((0.0, *shares, 1.0))):
        raise UserError(f"--rungs {text}: accepted: increasing shares between 0 and 1, as in 0.125,0.25,0.5")
    return shares


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    """Print what a tuning would train."""
    from asyncpp_cli.base.console import say, show_table
    from asyncpp_cli.base.tables import printed
    from asyncpp_cli.tune.plan import budget

    rungs = budget(plan)
    steps = sum(each.steps for each in rungs)
    grid_steps = sum(arm.grid_steps for arm in plan.arms)
    if as_json:
        content = {
            "arms": len(plan.arms),
            "points": [dict(candidate.values) for candidate in plan.arms[0].candidates],
            "rungs": [vars(each) for each in rungs],
            "runs": rungs[0].runs,
            "steps": steps,
            "grid_steps": grid_steps,
        }
        print(json.dumps(content, indent=1))
        return
    rows = [[f"{each.rung}", f"{each.runs}", each.until, f"{each.steps:,}"] for each in rungs]
    show_table(["rung", "runs", "to step", "steps"], rows, title=f"Tuning {len(plan.arms)} arms")
    for key in plan.keys:
        values = dict.fromkeys(printed(key, each.values[key]) for each in plan.arms[0].candidates)
        say(f"{key}: {', '.join(values)}")
    fewer = f", {grid_steps / steps:.1f} times fewer" if steps < grid_steps else ""
    say(f"{steps:,} steps in all; the grid takes {grid_steps:,}{fewer}.")


def _show_result(folder: Path, *, as_json: bool) -> None:
    """Print how the arms of a tuning stand."""
    from asyncpp_cli.base.console import say, show_table
    from asyncpp_cli.base.tables import Fit
    from asyncpp_cli.runs.experiment_folder import open_experiment
    from asyncpp_cli.slurm.run_status import SlurmQueue
    from asyncpp_cli.tune.plan import plan_in
    from asyncpp_cli.tune.result import Tuning
    from asyncpp_cli.tune.standing import standings

    experiment, plan = open_experiment(folder), plan_in(folder)
    tuning = Tuning(plan=plan, arms=standings(experiment, plan, scheduler=SlurmQueue(experiment)))
    if as_json:
        print(json.dumps(tuning.records, indent=1))
        return
    columns, rows = tuning.table
    fit = Fit(fold=["state"], hide=["steps of the grid's"])
    show_table(columns, rows, title=f"{experiment.name}: {len(tuning.arms)} arms", fit=fit)
    for line in tuning.remarks:
        say(line)
