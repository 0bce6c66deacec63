"""`asyncpp remove`: removes runs from an experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import ExperimentOrRun


def remove(
    folder: ExperimentOrRun,
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="More runs.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove runs with all that they have measured, and their cells.

    Names the files and steps that are lost, and asks. Running and queued runs are refused.

    `asyncpp sweep` with the experiment's template adds the cells again, as runs that never started.
    """
    from asyncpp_cli.base.console import agreed, command, say
    from asyncpp_cli.experiment.removal import checked, remove_runs
    from asyncpp_cli.runs.experiment_folder import runs_named

    experiment, chosen = runs_named(folder, runs)
    if not chosen:
        raise UserError(
            f"no runs named; accepted: {folder}/RUN, or ids after the folder, as {command('status', folder)} "
            "shows them"
        )
    for each in checked(experiment, chosen):
        say(each.text)
    noun = "this run" if len(chosen) == 1 else f"these {len(chosen)} runs"
    if not yes and not agreed(f"Remove {noun} for good?", refused="Nothing was removed."):
        raise typer.Exit(1)
    remove_runs(experiment, chosen)
    say(f"Removed {len(chosen)} of {len(experiment.cells)} runs.")
