"""`asyncpp cancel`: ends an experiment's runs, wherever they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.completion import experiments, runs_of_folder


def cancel(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR[/RUN]",
            help="An experiment, or a run of it by the beginning of its id.",
            autocompletion=experiments,
        ),
    ],
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="More runs; default: all of DIR.",
            autocompletion=runs_of_folder,
        ),
    ] = None,
) -> None:
    """Cancel queued and running runs. Running ones save first; launch again to resume them.

    An open launch, here or elsewhere, does not start any of them afterwards.

    Returns when all of them have ended, so that they can be launched again at once.
    """
    from asyncpp_cli.console import say
    from asyncpp_cli.launch.cancel import cancel_runs
    from asyncpp_cli.runs.experiment_folder import runs_named

    experiment, chosen = runs_named(folder, runs)
    queued, running = cancel_runs(experiment, chosen or experiment.runs)
    say(f"Cancelled: {queued} queued, {running} running.")
