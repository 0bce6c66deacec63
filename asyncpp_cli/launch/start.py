"""Which runs `asyncpp launch` starts, and launching them, here or on a cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.base.console import command, quoted, say
from asyncpp_cli.base.errors import INTERRUPTED, UserError
from asyncpp_cli.launch.cancel import Cancellations
from asyncpp_cli.launch.cluster import follow, show_scripts, submit_missing
from asyncpp_cli.launch.common.options import LaunchOptions, flags
from asyncpp_cli.launch.dry_run import dry_run
from asyncpp_cli.launch.local_machine import Interrupted, Launcher, tasks_of
from asyncpp_cli.launch.progress import Display, Remark, shown_progress
from asyncpp_cli.launch.submission.end_message import claim_end, tell_end
from asyncpp_cli.launch.submission.sbatch import check_folder_name
from asyncpp_cli.runs.attempts.repair import damage, repair_run, restoring
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment, config_problem
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import UNKNOWN, Cause, State, is_done, state_after
from asyncpp_cli.sites.profile import LOCAL, Site, find_site, site_files
from asyncpp_cli.sites.resources import this_machine
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue


def launch_experiment(experiment: Experiment, options: LaunchOptions) -> int:
    """Launch the runs that are not completed; returns the exit code of `asyncpp launch`. Says what is next.

    Raises:
        UserError: a run, the site or an option is not accepted; nothing was started.
    """
    profile = find_site(options.site)
    if options.until is not None:
        options = replace(options, pauses={cell.id: options.until for cell in experiment.cells})
    local = profile.scheduler == LOCAL
    if local and (options.wait or options.retries is not None):
        raise UserError(f"--wait and --retries are for clusters, and {options.site} is this machine")
    if options.dry_run:
        if not local:
            show_scripts(experiment, profile, options)
        return _rehearse(experiment, options)
    if local:
        code = launch_locally(experiment, options)
    else:
        options = replace(options, tell_end=not (options.wait or options.pauses))
        code = launch_on_cluster(experiment, profile, options)
    if (local or options.wait) and code != INTERRUPTED:
        say(_next(experiment, options, complete=code == 0 and not options.pauses))
        if local or (profile.on_end and claim_end(experiment)):
            tell_end(experiment, profile.on_end, source=profile.file)
    return code


def _next(experiment: Experiment, options: LaunchOptions, *, complete: bool) -> str:
    """What to do after a launch."""
    folder = experiment.folder
    if not complete:
        words = _words(options)
        if any(config_problem(experiment, cell) for cell in experiment.cells):
            return f"Next: {command('status', folder)}    restore: {restoring(experiment.runs[0])}"
        states = {run.id: current_status(run).state for run in experiment.runs}
        if State.DAMAGED in states.values():
            repair = command("launch", folder, "--failed", *words)
            return f"Next: {command('status', folder)}    repair: {repair}"
        failed = [run_id for run_id, state in states.items() if state == State.FAILED]
        resume = command("launch", folder, *words)
        if failed:
            return f"Next: {command('logs', folder / failed[0])}    resume: {resume}"
        return f"Next: {command('status', folder)}    go on: {resume}"
    page = command("report", folder, "--format", "html", "--out", "report.html")
    return f"Next: {command('report', folder)}    with curves: {page}"


def _rehearse(experiment: Experiment, options: LaunchOptions) -> int:
    from asyncpp_cli.launch.expected import expected_line

    only = options.only
    try:
        cells = tuple(cell for cell in experiment.cells if only is None or cell.id in only)
        if not dry_run(replace(experiment, cells=cells), replay=options.replay, quiet=options.quiet):
            return 1
        if options.site == LOCAL and (
            line := expected_line([experiment.run(cell.id).config() for cell in cells])
        ):
            say(line)
        say(f"Next: {command('launch', experiment.folder, *_words(options))}")
        return 0
    except Interrupted as interrupted:
        say(f"{interrupted}: the dry run is ended, and what it wrote is removed.")
        return INTERRUPTED


def launch_on_cluster(experiment: Experiment, site: Site, options: LaunchOptions) -> int:
    """Submit the missing runs, and follow them if `options.wait`; returns the command's exit code.

    Raises:
        UserError: a run or the profile is invalid, or SLURM refuses; nothing is queued.
    """
    check_folder_name(experiment.folder)
    cancelled = Cancellations(experiment)
    try:
        left = submit_missing(experiment, site, options, cancelled=cancelled)
        if not options.wait:
            return 0
        return follow(experiment, site, options, left=left, cancelled=cancelled)
    except KeyboardInterrupt:
        status, cancel = command("status", experiment.folder), command("cancel", experiment.folder)
        say(f"Jobs that are queued are not affected: {status}; to cancel them: {cancel}")
        return INTERRUPTED


def launch_locally(
    experiment: Experiment,
    options: LaunchOptions,
    *,
    remark: Remark | None = None,
    resume: str = "",
) -> int:
    """Launch an experiment on this machine; returns the command's exit code.

    Args:
        experiment: its runs that are not done are trained.
        options: of the launch.
        remark: said once while the runs train.
        resume: command that goes on after Ctrl-C; empty: this launch again.

    Raises:
        UserError: a run needs more than this machine has.
    """
    from asyncpp_cli.launch.expected import expected_seconds

    only, pauses = options.only, options.pauses
    cancelled = Cancellations(experiment)
    machine = this_machine()
    runs = [run for run in experiment.runs_to_launch if only is None or run.id in only]
    statuses = {run: current_status(run) for run in runs}
    problems = {cell.id: config_problem(experiment, cell) for cell in experiment.cells}
    lost = {run_id for run_id, each in problems.items() if each and state_after(each) is State.DAMAGED}
    missing = [run for run in runs if run.id in lost or not is_done(statuses[run], until=pauses.get(run.id))]
    damaged = [run for run in missing if statuses[run].state in UNKNOWN]
    whole = [run for run in missing if run not in damaged]
    tasks, refused = tasks_of(whole, replay=options.replay, machine=machine, pauses=pauses)
    for run in damaged:
        say(f"left out: {damage(run, statuses[run])}")
    for message in refused:
        say(f"left out: {message}; to restore it: {restoring(runs[0])}")
    if any(0 < task.resources.gpus < task.resources.processes for task in tasks):
        say(
            f"GPUs here: {len(machine.gpus)}; the processes of a run share them, and their messages go "
            "through host memory: for trying a run out, not for speed (site.device=cpu trains on the CPU)"
        )
    expected: dict[str, float] = {}
    if not (options.replay or options.quiet):
        expected, sentence = expected_seconds(tasks, machine=machine)
        if sentence:
            say(sentence)
    try:
        done_before = len(runs) - len(missing)
        display = Display(done_before=done_before, pauses=pauses, expected=expected, remark=remark)
        with shown_progress(display, quiet=options.quiet) as progress:
            ended = Launcher(
                tasks,
                machine=machine,
                max_parallel=options.max_parallel,
                replay=options.replay,
                progress=progress,
                scheduler=SlurmQueue(experiment),
                cancelled=cancelled,
            ).run()
    except Interrupted as interrupted:
        _say_interrupted(interrupted, experiment)
        say(f"To resume: {resume or resume_command(runs, experiment.folder, options)}")
        return INTERRUPTED
    done = [is_done(status, until=task.until) for task, status in zip(tasks, ended, strict=True)]
    completed = done_before + sum(done)
    left_alone = (State.COMPLETED, State.PAUSED, State.RUNNING)
    left_out = sum(
        task.run.id in cancelled and status.state not in left_alone and status.cause != Cause.CANCELLED
        for task, status in zip(tasks, ended, strict=True)
    )
    cancelled_note = f"; {left_out} were cancelled before they began" if left_out else ""
    how = "completed or paused" if pauses else "completed"
    say(f"{completed} of {len(runs)} runs {how} in {experiment.folder}{cancelled_note}")
    return 0 if completed == len(runs) else 1


def _say_interrupted(interrupted: Interrupted, experiment: Experiment) -> None:
    """Say what Ctrl-C has ended, and what goes on."""
    own = f"ended the runs that this launch had started ({interrupted.own})"
    say(f"{interrupted}: {own if interrupted.own else 'no run of this launch was training'}.")
    if interrupted.others:
        cancel = command("cancel", experiment.folder)
        say(f"Runs of other launches go on ({interrupted.others}); to end them: {cancel}")


def _words(options: LaunchOptions) -> list[str]:
    """The words of a command line that launches at the same site with the same options."""
    return flags(options) + ([] if options.site == LOCAL else ["--site", options.site])


def resume_command(runs: Sequence[Run], folder: Path, options: LaunchOptions) -> str:
    """The command that resumes what this one has not completed."""
    words = _words(options)
    if options.pauses and options.until is None:
        return command("tune", folder, *words)
    # What was chosen to be tried again is chosen by its name: it has not failed this time.
    left = (run.id for run in runs if current_status(run).state != State.COMPLETED)
    names = () if options.only is None else left
    until = [] if options.until is None else ["--until", str(options.until)]
    return command("launch", folder, *names, *words, *until)


def chosen_by_site(
    experiment: Experiment, runs: Sequence[Run], *, failed: bool, timeout: bool, oom: bool, site: str | None
) -> dict[str, list[str] | None]:
    """Ids of the runs to start, by site; says which named runs have nothing to start. Repairs damaged ones.

    Args:
        experiment: the experiment.
        runs: runs to choose whatever ended them.
        failed: choose runs that failed or are damaged.
        timeout: choose runs that a time limit ended.
        oom: choose runs that ran out of memory.
        site: where to start all of them; None: where each was submitted last, or here.

    Raises:
        UserError: `site` is None, and a run was submitted last with a profile that has no name.
    """
    named = {run.id for run in runs}
    chosen = runs_to_retry(experiment, named=named, failed=failed, timeout=timeout, oom=oom)
    kinds = {"failed": failed, "reached a time limit": timeout, "ran out of memory": oom}
    if not chosen and (wanted := " or ".join(kind for kind, is_wanted in kinds.items() if is_wanted)):
        say(f"None of the {len(experiment.runs)} runs {wanted}: {command('status', experiment.folder)}")
    # A profile runs commands, and who wrote the experiment's folder need not be who launches it.
    known = {"", *site_files()}
    if site is None and (files := sorted(set(chosen.values()) - known)):
        raise UserError(
            f"{experiment.folder} says that its runs were last submitted with {files[0]}; accepted: --site "
            f"{quoted(files[0])}, if you trust that profile"
        )
    by_site: dict[str, list[str] | None] = {}
    for run_id, submitted_to in chosen.items():
        try:
            if done := repair_run(experiment.run(run_id)):
                say(done)
        except UserError as error:
            say(f"left out: {error}")
            continue
        name = site or submitted_to or LOCAL
        by_site[name] = [*(by_site.get(name) or ()), run_id]
    return by_site


def runs_to_retry(
    experiment: Experiment, *, named: Collection[str], failed: bool, timeout: bool, oom: bool
) -> dict[str, str]:
    """Ids of the runs to start again, each with the site it was last submitted to (empty: none).

    Completed, running and queued runs are never chosen; of those that are named it says so.

    Args:
        experiment: the experiment.
        named: ids of runs to choose whatever ended them.
        failed: choose runs that failed or are damaged.
        timeout: choose runs that a time limit ended.
        oom: choose runs that ran out of memory.
    """
    queue = SlurmQueue(experiment)
    chosen = {}
    for run in experiment.runs:
        run_status = queue.run_status(run, with_accounting=True)
        status = run_status.status
        if status.state == State.COMPLETED or run_status.is_live:
            if run.id in named:
                say(_why_skipped(run_status))
            continue
        wanted = run.id in named or (failed and status.state in (State.FAILED, State.DAMAGED))
        if timeout:
            wanted |= status.cause == Cause.TIME_LIMIT or run_status.job_state == "TIMEOUT"
        if oom:
            wanted |= status.cause == Cause.OUT_OF_MEMORY or run_status.job_state == "OUT_OF_MEMORY"
        if wanted:
            chosen[run.id] = run_status.site
    return chosen


def _why_skipped(run_status: RunStatus) -> str:
    """Why a named run is not started again, in a line."""
    run_id, status = run_status.run.id, run_status.status
    if status.state == State.COMPLETED:
        return f"{run_id} is completed: nothing is left to train"
    if status.state == State.RUNNING:
        return f"{run_id} is running on {status.host}, attempt {status.attempt}"
    return f"{run_id} is queued as job {run_status.job_id}"
