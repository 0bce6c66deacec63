"""`asyncpp cancel`: end an experiment's runs, wherever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cancel(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Ids of runs, or their beginnings; without: all."),
    ] = None,
) -> None:
    """End runs that are queued or going on. Those that train save first; launch again to go on with them.

    A launch that is still open, here or elsewhere, starts none of these runs that it has not begun.

    It returns when nothing of them is left, so that a launch right after it submits them again.
    """
    from asyncpp_cli.cluster.ending import cancel_runs
    from asyncpp_cli.console import say
    from asyncpp_cli.runs import chosen_runs, open_experiment

    experiment = open_experiment(folder)
    waiting, running = cancel_runs(experiment, chosen_runs(experiment, runs or []))
    say(f"Cancelled: {waiting} that waited, {running} that ran.")
