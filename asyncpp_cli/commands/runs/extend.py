"""`asyncpp extend`: a new experiment whose runs continue those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import ExperimentOrRun, MoreRuns


def extend(
    folder: ExperimentOrRun,
    runs: MoreRuns = None,
    best: Annotated[
        bool, typer.Option("--best", help="After `asyncpp tune`: the best run of each arm, or its seeds.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="NEW", help="Folder of the new experiment: new or empty.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps in all, with those done.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(metavar="P", min=1, help="Pipeline stages from here on.")
    ] = None,
    data: Annotated[
        int | None, typer.Option(metavar="D", min=1, help="Data ranks from here on; a step keeps its tokens.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="More changes: optimizer.schedule=constant."),
    ] = None,
) -> None:
    """Continue runs with more steps or another layout.

    New runs start from the newest checkpoints; the runs that are continued stay as they are. Each new run
    knows which run and step it continues.

    Its learning rate follows its own number of steps, so it may jump where it begins; the command says how.
    """
    from asyncpp_cli.base.console import command, say
    from asyncpp_cli.experiment.continuation import SHORT_NAMES, continuations, write_continuations
    from asyncpp_cli.experiment.template import parse_setting
    from asyncpp_cli.runs.experiment_folder import runs_named
    from asyncpp_cli.tune.result import best_runs

    if out is None:
        raise UserError("--out NEW is missing: the folder of the new experiment")
    wanted: dict[str, Any] = {}
    for change in changes or []:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise UserError(f"--set {change!r} is not KEY=VALUE, as in optimizer.schedule=constant")
        wanted[key] = parse_setting(key, text)
    given = {"steps": steps, "stages": stages, "data": data}
    wanted |= {SHORT_NAMES[name]: value for name, value in given.items() if value is not None}
    if not wanted:
        raise UserError("nothing to change; accepted: --steps, --stages, --data, --set KEY=VALUE")
    experiment, chosen = runs_named(folder, runs)
    if best:
        if chosen:
            raise UserError("--best chooses the runs: leave out RUN")
        chosen = best_runs(experiment)
    continued = continuations(experiment, chosen or experiment.runs, changes=wanted)
    write_continuations(continued, experiment, out=out)
    for each in continued:
        say(f"{each.cell.id} {each.lineage.text}")
    for line in dict.fromkeys(each.learning_rate for each in continued):
        say(f"Note: {line}.")
    say(f"Wrote {len(continued)} runs to {out}. Next: {command('launch', out)}")
