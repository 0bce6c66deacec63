"""`asyncpp launch`: run what an experiment still lacks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.runs import Experiment

LOCAL = "local"
INTERRUPTED_CODE = 130


def launch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    site: Annotated[str, typer.Option("--site", metavar="NAME", help="Where to run; `local`: here.")] = LOCAL,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Each run in one process, its ranks taking turns: the same numbers."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check every cell, and train a small twin of it for a few steps."),
    ] = False,
    max_parallel: Annotated[
        int | None,
        typer.Option(
            "--max-parallel", metavar="N", min=1, help="Runs at once; without: as many as have a core a rank."
        ),
    ] = None,
) -> None:
    """Run what an experiment still lacks, and show how it goes. Launching again is safe.

    Completed runs are left alone, and so are those that somebody else is running. Failed and interrupted
    ones go on from their newest valid checkpoint. Ctrl-C lets the runs that this launch has started save,
    ends them and marks them interrupted; launch again to go on. Exit code 0 if all runs are completed, 1 if
    one is not, 130 after Ctrl-C.
    """
    from asyncpp_cli.runs import open_experiment

    _check_site(site)
    experiment = open_experiment(folder)
    if dry_run:
        raise typer.Exit(_rehearse(experiment, replay=replay))
    raise typer.Exit(launch_here(folder, replay=replay, max_parallel=max_parallel))


def _rehearse(experiment: Experiment, *, replay: bool) -> int:
    from asyncpp_cli.cluster.launcher import Interrupted
    from asyncpp_cli.console import say
    from asyncpp_cli.dry_run import dry_run_of

    try:
        return 0 if dry_run_of(experiment, replay=replay) else 1
    except Interrupted as interrupted:
        say(f"{interrupted}: the dry run is ended, and what it wrote is removed.")
        return INTERRUPTED_CODE


def _check_site(name: str) -> None:
    from asyncpp_cli import templates

    if name not in templates.names("sites"):
        accepted = ", ".join(templates.names("sites"))
        raise UserError(f"--site {name}: unknown site; accepted: {accepted}")


def launch_here(folder: Path, *, replay: bool, max_parallel: int | None) -> int:
    """Launch an experiment on this machine. The command's exit code.

    Raises:
        UserError: there is no experiment, or a run asks for what this machine lacks.
    """
    from asyncpp_cli.cluster.launcher import Interrupted, Launcher, tasks_of
    from asyncpp_cli.cluster.local import check_folder
    from asyncpp_cli.cluster.resources import this_machine
    from asyncpp_cli.console import say
    from asyncpp_cli.progress import shown_progress
    from asyncpp_cli.runs import State, open_experiment

    experiment = open_experiment(folder)
    check_folder(folder)
    machine = this_machine()
    tasks, damaged = tasks_of(experiment.runs, replay=replay, machine=machine)
    for message in damaged:
        say(f"left out: {message}")
    if machine.gpus and any(not task.resources.gpus and task.wants_gpus for task in tasks):
        say(f"{len(machine.gpus)} GPU here, and runs of more processes: on the CPU (--replay needs one GPU)")
    try:
        with shown_progress() as progress:
            statuses = Launcher(
                tasks, machine=machine, max_parallel=max_parallel, replay=replay, progress=progress
            ).run()
    except Interrupted as interrupted:
        say(f"{interrupted}: ended the runs that this launch had started.")
        say(f"To go on: asyncpp launch {shlex.quote(str(folder))}")
        return INTERRUPTED_CODE
    completed = sum(status.state == State.COMPLETED for status in statuses)
    say(f"{completed} of {len(experiment.cells)} runs completed in {folder}")
    return 0 if completed == len(experiment.cells) else 1
