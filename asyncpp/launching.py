"""Launching the missing runs of an experiment, here or on a cluster, as `asyncpp launch` does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpp_cli.errors import UserError
from asyncpp_cli.launch.pauses import NO_PAUSES, Pauses

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from asyncpp_cli.launch.sites import Site
    from asyncpp_cli.launch.submission.arrays import LaunchOptions
    from asyncpp_cli.runs.experiment_folder import Experiment
    from asyncpp_cli.runs.run_folder import Run

INTERRUPTED_CODE = 130


def launch_experiment(
    experiment: Experiment,
    *,
    site: str = "local",
    replay: bool = False,
    dry_run: bool = False,
    max_parallel: int | None = None,
    wait: bool = False,
    retries: int | None = None,
    report: bool = False,
    yes: bool = False,
    until: int | None = None,
    only: Collection[str] | None = None,
) -> int:
    """Launch the runs that are not completed; returns the exit code of `asyncpp launch`. Says what is next.

    Args:
        experiment: the experiment.
        site: site profile; `local`: this machine.
        replay: each run in one process.
        dry_run: only check every cell, and train a small twin of it.
        max_parallel: number of runs at a time; None: one core per rank here, no limit on a cluster.
        wait: on a cluster, stay until all runs have ended.
        retries: on a cluster, how often a failed run is started again; None: as the site says.
        report: on a cluster, add a job that writes the report.
        yes: do not ask, whatever the expected cost (`confirm_hours` of the site).
        until: step after which the runs pause; None: they train to the end.
        only: ids of the runs to consider; None: all.

    Raises:
        UserError: a run, the site or an option is not accepted; nothing was started.
    """
    from asyncpp_cli.console import say
    from asyncpp_cli.launch.end_message import claim_end, tell_end
    from asyncpp_cli.launch.sites import LOCAL, find_site

    profile = find_site(site)
    pauses = NO_PAUSES if until is None else {cell.id: until for cell in experiment.cells}
    if not (dry_run or yes) and not confirmed(experiment, profile, pauses, only=only):
        return 1
    if profile.scheduler == LOCAL:
        if wait or report or retries is not None:
            raise UserError(f"--wait, --report and --retries are for clusters, and {site} is this machine")
        if dry_run:
            return _rehearse(experiment, replay=replay, site=site, only=only)
        code = launch_locally(
            experiment.folder, replay=replay, max_parallel=max_parallel, only=only, pauses=pauses
        )
        if code != INTERRUPTED_CODE:
            say(_next(experiment, complete=code == 0 and not pauses))
            tell_end(experiment, profile.on_end, source=profile.file)
        return code
    from asyncpp_cli.launch.submission.arrays import LaunchOptions

    options = LaunchOptions(
        replay=replay,
        max_parallel=max_parallel,
        retries=retries,
        report=report,
        tell_end=not wait and not pauses,
        pauses=pauses,
    )
    if dry_run:
        from asyncpp_cli.launch.slurm.launcher import show_scripts

        show_scripts(experiment, profile, options)
        return _rehearse(experiment, replay=replay, site=site, only=only)
    code = launch_on_cluster(experiment, profile, options, wait=wait, only=only)
    if wait and code != INTERRUPTED_CODE:
        say(_next(experiment, complete=code == 0 and not pauses))
    if wait and code != INTERRUPTED_CODE and profile.on_end and claim_end(experiment):
        tell_end(experiment, profile.on_end, source=profile.file)
    return code


def _next(experiment: Experiment, *, complete: bool) -> str:
    """What to do after a launch."""
    from asyncpp_cli.console import command
    from asyncpp_cli.runs.attempts.settle import current_status
    from asyncpp_cli.runs.status import State

    folder = experiment.folder
    if not complete:
        failed = [run for run in experiment.runs if current_status(run).state == State.FAILED]
        if failed:
            return f"Next: {command('logs', folder / failed[0].id)}    resume: {command('launch', folder)}"
        return f"Next: {command('status', folder)}    go on: {command('launch', folder)}"
    page = command("report", folder, "--format", "html", "--out", "report.html")
    return f"Next: {command('report', folder)}    with curves: {page}"


def confirmed(
    experiment: Experiment, site: Site, pauses: Pauses, *, only: Collection[str] | None = None
) -> bool:
    """Whether the launch is within the site's `confirm_hours`, or the user has agreed to it.

    Raises:
        UserError: it is not, and there is no terminal to ask on.
    """
    from asyncpp_cli.console import agreed

    if site.confirm_hours is None:
        return True
    from asyncpp_cli.console import say
    from asyncpp_cli.launch.expected_cost import cost_line, expected_cost, question

    cost = expected_cost(experiment, site, pauses, only=only)
    asked = question(cost, site)
    if asked is None and (line := cost_line(cost)):
        say(line)
    return asked is None or agreed(f"{asked}; start them?", refused="nothing was started")


def _rehearse(experiment: Experiment, *, replay: bool, site: str, only: Collection[str] | None) -> int:
    from asyncpp_cli.console import command, say
    from asyncpp_cli.launch.local.dry_run import dry_run
    from asyncpp_cli.launch.local.launcher import Interrupted
    from asyncpp_cli.launch.sites import LOCAL

    try:
        cells = tuple(cell for cell in experiment.cells if only is None or cell.id in only)
        if not dry_run(replace(experiment, cells=cells), replay=replay):
            return 1
        at_site = [] if site == LOCAL else ["--site", site]
        say(f"Next: {command('launch', experiment.folder, *at_site)}")
        return 0
    except Interrupted as interrupted:
        say(f"{interrupted}: the dry run is ended, and what it wrote is removed.")
        return INTERRUPTED_CODE


def launch_on_cluster(
    experiment: Experiment, site: Site, options: LaunchOptions, *, wait: bool, only: Collection[str] | None
) -> int:
    """Submit the missing runs, and follow them if `wait`; returns the command's exit code.

    Raises:
        UserError: a run or the profile is invalid, or SLURM refuses; nothing is queued.
    """
    from asyncpp_cli.console import command, say
    from asyncpp_cli.launch.cancel import Cancellations
    from asyncpp_cli.launch.slurm.launcher import follow, submit_missing
    from asyncpp_cli.launch.submission.sbatch import check_folder_name

    check_folder_name(experiment.folder)
    cancelled = Cancellations(experiment)
    submit_missing(experiment, site, options, only=only, cancelled=cancelled)
    if not wait:
        return 0
    try:
        return follow(experiment, site, options, cancelled=cancelled)
    except KeyboardInterrupt:
        status, cancel = command("status", experiment.folder), command("cancel", experiment.folder)
        say(f"The jobs are not affected: {status}; to cancel them: {cancel}")
        return INTERRUPTED_CODE


def launch_locally(
    folder: Path,
    *,
    replay: bool,
    max_parallel: int | None,
    only: Collection[str] | None = None,
    pauses: Pauses = NO_PAUSES,
) -> int:
    """Launch an experiment on this machine; returns the command's exit code.

    Args:
        folder: the experiment's folder.
        replay: run each in one process.
        max_parallel: number of runs at a time; None: one core per rank.
        only: ids of the runs to consider; None: all.
        pauses: steps after which runs pause.

    Raises:
        UserError: there is no experiment, or a run needs more than this machine has.
    """
    from asyncpp_cli.console import say
    from asyncpp_cli.launch.cancel import Cancellations
    from asyncpp_cli.launch.local.launcher import Interrupted, Launcher, tasks_of
    from asyncpp_cli.launch.progress import shown_progress
    from asyncpp_cli.launch.resources import this_machine
    from asyncpp_cli.launch.slurm.run_status import SlurmQueue
    from asyncpp_cli.runs.attempts.settle import current_status
    from asyncpp_cli.runs.experiment_folder import open_experiment
    from asyncpp_cli.runs.status import Cause, State, is_done

    experiment = open_experiment(folder)
    cancelled = Cancellations(experiment)
    machine = this_machine()
    runs = [run for run in experiment.runs_to_launch if only is None or run.id in only]
    # Configurations of runs that are done are not read: there may be a thousand.
    missing = [run for run in runs if not is_done(current_status(run), until=pauses.get(run.id))]
    tasks, damaged = tasks_of(missing, replay=replay, machine=machine, pauses=pauses)
    for message in damaged:
        say(f"left out: {message}")
    if any(0 < task.resources.gpus < task.resources.processes for task in tasks):
        say(
            f"GPUs here: {len(machine.gpus)}; the processes of a run share them, and their messages go "
            "through host memory: for trying a run out, not for speed (site.device=cpu trains on the CPU)"
        )
    try:
        with shown_progress(done_before=len(runs) - len(missing), pauses=pauses) as progress:
            statuses = Launcher(
                tasks,
                machine=machine,
                max_parallel=max_parallel,
                replay=replay,
                progress=progress,
                scheduler=SlurmQueue(experiment),
                cancelled=cancelled,
            ).run()
    except Interrupted as interrupted:
        say(f"{interrupted}: ended the runs that this launch had started.")
        resume = resume_command(
            runs, folder, replay=replay, max_parallel=max_parallel, only=only, pauses=pauses
        )
        say(f"To resume: {resume}")
        return INTERRUPTED_CODE
    done = [is_done(status, until=task.until) for task, status in zip(tasks, statuses, strict=True)]
    completed = len(runs) - len(missing) + sum(done)
    ended = (State.COMPLETED, State.PAUSED, State.RUNNING)
    left_out = sum(
        task.run.id in cancelled and status.state not in ended and status.cause != Cause.CANCELLED
        for task, status in zip(tasks, statuses, strict=True)
    )
    cancelled_note = f"; {left_out} were cancelled before they began" if left_out else ""
    how = "completed or paused" if pauses else "completed"
    say(f"{completed} of {len(runs)} runs {how} in {folder}{cancelled_note}")
    return 0 if completed == len(runs) else 1


def resume_command(
    runs: Sequence[Run],
    folder: Path,
    *,
    replay: bool,
    max_parallel: int | None,
    only: Collection[str] | None,
    pauses: Pauses,
) -> str:
    """The command that resumes what this one has not completed."""
    from asyncpp_cli.console import command
    from asyncpp_cli.runs.attempts.settle import current_status
    from asyncpp_cli.runs.status import State

    flags = ["--replay"] if replay else []
    flags += ["--max-parallel", str(max_parallel)] if max_parallel is not None else []
    if only is not None and pauses:
        return command("tune", folder, *flags)
    if only is not None:
        return command(
            "launch", folder, *(run.id for run in runs if current_status(run).state != State.COMPLETED)
        )
    flags += ["--until", str(next(iter(pauses.values())))] if pauses else []
    return command("launch", folder, *flags)
