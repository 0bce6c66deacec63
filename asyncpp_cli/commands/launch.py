"""`asyncpp launch`: run what an experiment still lacks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from asyncpp_cli.cluster.sites import Site
    from asyncpp_cli.cluster.submit import Choices
    from asyncpp_cli.runs import Experiment, Run

INTERRUPTED_CODE = 130


def launch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    site: Annotated[
        str, typer.Option("--site", metavar="NAME", help="Where to run; `local`: here.")
    ] = "local",
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
    wait: Annotated[
        bool, typer.Option("--wait", help="On a cluster: stay, and show how the runs go. Leaving ends none.")
    ] = False,
    retries: Annotated[
        int | None,
        typer.Option(
            "--retries", metavar="N", min=0, help="On a cluster: how often a run that fails is started again."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="On a cluster: a job that writes the report when all have ended.")
    ] = False,
) -> None:
    """Run what an experiment still lacks, and show how it goes. Launching again is safe.

    Completed runs are left alone, and so are those that somebody else is running. Failed and interrupted
    ones go on from their newest valid checkpoint. Ctrl-C lets the runs that this launch has started save,
    ends them and marks them interrupted; launch again to go on. Exit code 0 if all runs are completed, 1 if
    one is not, 130 after Ctrl-C.

    On a cluster (see docs/slurm.md) it submits and returns: what is completed, running or queued is left
    alone. With --wait it stays; Ctrl-C then only ends the watching.
    """
    from asyncpp_cli.cluster.sites import LOCAL, find_site
    from asyncpp_cli.runs import open_experiment

    chosen = find_site(site)
    experiment = open_experiment(folder)
    if chosen.scheduler == LOCAL:
        if wait or report or retries is not None:
            raise UserError(f"--wait, --report and --retries are for clusters, and {site} is this machine")
        if dry_run:
            raise typer.Exit(_rehearse(experiment, replay=replay))
        raise typer.Exit(launch_here(folder, replay=replay, max_parallel=max_parallel))
    from asyncpp_cli.cluster.submit import Choices

    choices = Choices(replay=replay, max_parallel=max_parallel, retries=retries, report=report)
    if dry_run:
        from asyncpp_cli.cluster.remote import show_scripts

        show_scripts(experiment, chosen, choices)
        raise typer.Exit(_rehearse(experiment, replay=replay))
    raise typer.Exit(launch_there(experiment, chosen, choices, wait=wait, only=None))


def _rehearse(experiment: Experiment, *, replay: bool) -> int:
    from asyncpp_cli.cluster.launcher import Interrupted
    from asyncpp_cli.console import say
    from asyncpp_cli.dry_run import dry_run_of

    try:
        return 0 if dry_run_of(experiment, replay=replay) else 1
    except Interrupted as interrupted:
        say(f"{interrupted}: the dry run is ended, and what it wrote is removed.")
        return INTERRUPTED_CODE


def launch_there(
    experiment: Experiment, site: Site, choices: Choices, *, wait: bool, only: Collection[str] | None
) -> int:
    """Submit what is missing to a cluster, and follow it if told to. The command's exit code.

    Raises:
        UserError: something is wrong with a run or the site, or SLURM refuses; nothing is queued then.
    """
    from asyncpp_cli.cluster.cancellations import Cancellations
    from asyncpp_cli.cluster.local import check_folder
    from asyncpp_cli.cluster.remote import follow, submit_missing
    from asyncpp_cli.console import command, say

    check_folder(experiment.folder)
    cancelled = Cancellations(experiment)
    submit_missing(experiment, site, choices, only=only, cancelled=cancelled)
    if not wait:
        return 0
    try:
        return follow(experiment, site, choices, cancelled=cancelled)
    except KeyboardInterrupt:
        look, end = command("status", experiment.folder), command("cancel", experiment.folder)
        say(f"The jobs go on without this: {look}; to end them: {end}")
        return INTERRUPTED_CODE


def launch_here(
    folder: Path, *, replay: bool, max_parallel: int | None, only: Collection[str] | None = None
) -> int:
    """Launch an experiment on this machine. The command's exit code.

    Args:
        folder: of the experiment.
        replay: each run in one process.
        max_parallel: runs at once.
        only: ids of the runs that are meant; None: all.

    Raises:
        UserError: there is no experiment, or a run asks for what this machine lacks.
    """
    from asyncpp_cli.cluster.attempts import look
    from asyncpp_cli.cluster.cancellations import Cancellations
    from asyncpp_cli.cluster.launcher import Interrupted, Launcher, tasks_of
    from asyncpp_cli.cluster.local import check_folder
    from asyncpp_cli.cluster.queue import Queue
    from asyncpp_cli.cluster.resources import this_machine
    from asyncpp_cli.console import say
    from asyncpp_cli.progress import shown_progress
    from asyncpp_cli.runs import Cause, State, open_experiment

    experiment = open_experiment(folder)
    cancelled = Cancellations(experiment)
    check_folder(folder)
    machine = this_machine()
    runs = [run for run in experiment.runs if only is None or run.id in only]
    # Of a thousand completed runs not even the configurations are read.
    missing = [run for run in runs if look(run).state != State.COMPLETED]
    tasks, damaged = tasks_of(missing, replay=replay, machine=machine)
    for message in damaged:
        say(f"left out: {message}")
    if machine.gpus and any(not task.resources.gpus and task.wants_gpus for task in tasks):
        say(f"{len(machine.gpus)} GPU here, and runs of more processes: on the CPU (--replay needs one GPU)")
    try:
        with shown_progress(done_before=len(runs) - len(missing)) as progress:
            statuses = Launcher(
                tasks,
                machine=machine,
                max_parallel=max_parallel,
                replay=replay,
                progress=progress,
                scheduler=Queue(experiment),
                cancelled=cancelled,
            ).run()
    except Interrupted as interrupted:
        say(f"{interrupted}: ended the runs that this launch had started.")
        say(f"To go on: {again(runs, folder, replay=replay, max_parallel=max_parallel, only=only)}")
        return INTERRUPTED_CODE
    completed = len(runs) - len(missing) + sum(status.state == State.COMPLETED for status in statuses)
    ended = (State.COMPLETED, State.RUNNING)
    left_out = sum(
        task.run.id in cancelled and status.state not in ended and status.cause != Cause.CANCELLED
        for task, status in zip(tasks, statuses, strict=True)
    )
    beside = f"; {left_out} were cancelled before they began" if left_out else ""
    say(f"{completed} of {len(runs)} runs completed in {folder}{beside}")
    return 0 if completed == len(runs) else 1


def again(
    runs: Sequence[Run],
    folder: Path,
    *,
    replay: bool,
    max_parallel: int | None,
    only: Collection[str] | None,
) -> str:
    """The command that goes on with what this one has not done, in the same way."""
    from asyncpp_cli.cluster.attempts import look
    from asyncpp_cli.console import command
    from asyncpp_cli.runs import State

    if only is not None:
        return command("retry", folder, *(run.id for run in runs if look(run).state != State.COMPLETED))
    flags = ["--replay"] if replay else []
    flags += ["--max-parallel", str(max_parallel)] if max_parallel is not None else []
    return command("launch", folder, *flags)
