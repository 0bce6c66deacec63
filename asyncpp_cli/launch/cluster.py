"""Launching on a SLURM cluster: submits the missing runs and, with --wait, follows them."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.base.console import command, say
from asyncpp_cli.launch.common.arrays import (
    PlannedArray,
    free_jobs,
    plan_arrays,
    runs_to_submit,
    site_settings_of,
)
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.launch.common.snapshot import code_hash
from asyncpp_cli.launch.common.srun_command import network_variables, srun_command
from asyncpp_cli.launch.progress import Display, shown_progress
from asyncpp_cli.launch.submission.sbatch import annotated
from asyncpp_cli.launch.submission.submit import array_script, submit
from asyncpp_cli.runs.attempts.repair import damage
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import UNKNOWN, State, is_done
from asyncpp_cli.sites.profile import Site, time_note
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import SlurmError
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue, hold_notes
from asyncpp_cli.slurm.submissions import Submission, submission_lock

_POLL_SECONDS = 2.0
_POLLS_WITHOUT_JOB = 3
"""Polls without a job after which a run counts as ended; its last status may be seen late."""


def show_scripts(experiment: Experiment, site: Site, options: LaunchOptions) -> None:
    """Print the script of each array that a launch would submit now."""
    try:
        max_array_size = slurm.cluster().max_array_size
    except SlurmError as error:
        max_array_size = slurm.max_array_size({})
        say(f"{error}; assuming SLURM's default size of arrays")
    run_statuses = SlurmQueue(experiment).run_statuses(with_accounting=False)
    runs = runs_to_submit(run_statuses, options)
    planned = plan_arrays(runs, site, options, max_array_size=max_array_size)
    for array in planned:
        first = array.throttle.after
        after = "" if first is None else f", to start when array {first + 1} has ended"
        print(
            f"# A preview: `launch --site {site.name}` submits it, from a folder that it makes for it; "
            f"what to change is in {site.file}\n# {len(array.runs)} runs of {array.shape}{after}"
        )
        print(annotated(array_script(experiment, site, array), site))
        print(f"# which starts the ranks, here of {array.runs[0].run.id}, with\n{_srun_line(array, site)}\n")


def _srun_line(array: PlannedArray, site: Site) -> str:
    """The command that starts the ranks of an array's first run, for people to read."""
    run = array.runs[0].run
    code = Path("../../code") / code_hash()
    words = srun_command(
        run,
        site,
        attempt=run.status().attempt + 1,
        shape=array.shape,
        site_settings=site_settings_of(array.shape, site),
        folder=run.folder.absolute().parents[1] / "submissions" / "NAME",
        environment={"PYTHONPATH": str(code)} | network_variables(site.network_interface),
    )
    return shlex.join(words)


def submit_missing(
    experiment: Experiment,
    site: Site,
    options: LaunchOptions,
    *,
    cancelled: Container[str],
) -> set[str]:
    """Submit the runs that are neither done, nor running, nor queued.

    Returns:
        Ids of those that exceed the site's `submit_limit`, and wait for room.

    Args:
        experiment: the experiment.
        site: site profile.
        options: options of the launch.
        cancelled: ids of runs not to submit.

    Raises:
        UserError: a run or the profile is invalid, or SLURM refuses; nothing is queued.
    """
    with submission_lock(experiment):
        queue = SlurmQueue(experiment)
        queue.check_answer()
        run_statuses = [queue.run_status(run, with_accounting=False) for run in experiment.runs_to_launch]
        for each in run_statuses:
            if each.status.state in UNKNOWN and (options.only is None or each.run.id in options.only):
                say(f"left out: {damage(each.run, each.status)}")
        missing = runs_to_submit(run_statuses, options)
        runs = [run for run in missing if run.id not in cancelled]
        free = free_jobs(site)
        if free is not None and free > 1 and options.tell_end and site.on_end:
            free -= 1  # for the job that tells the end
        max_array_size = slurm.cluster().max_array_size
        planned = plan_arrays(runs, site, options, max_array_size=max_array_size, free_jobs=free)
        left = {run.id for run in runs} - {each.run.id for array in planned for each in array.runs}
        if not planned:
            _say_nothing_to_do(experiment, run_statuses, options, left=len(left), site=site)
            for note in () if options.wait else hold_notes(run_statuses):
                say(note)
            return left
        live = {run_status.job_id.partition("_")[0] for run_status in run_statuses if run_status.has_job}
        submission = submit(experiment, site, planned, options, live=sorted(live))
    _say_submitted(experiment, submission, planned, left=len(left), site=site)
    return left


def _say_nothing_to_do(
    experiment: Experiment,
    run_statuses: Sequence[RunStatus],
    options: LaunchOptions,
    *,
    left: int,
    site: Site,
) -> None:
    not_done = _not_done(run_statuses, options)
    queued = sum(run_status.has_job for run_status in not_done)
    elsewhere = sum(
        run_status.status.state == State.RUNNING and not run_status.has_job for run_status in not_done
    )
    done = f"{len(run_statuses) - len(not_done)} of {len(run_statuses)} runs {_done(options)}"
    say(
        f"Nothing to submit: {done}, {queued} queued or running"
        + (f", {elsewhere} running elsewhere" if elsewhere else "")
    )
    if left:
        say(f"{left} exceed {site.file}: submit_limit: {site.submit_limit} jobs at once")
    _say_next_commands(experiment)


def _say_submitted(
    experiment: Experiment, submission: Submission, planned: Sequence[PlannedArray], *, left: int, site: Site
) -> None:
    count = sum(len(array.runs) for array in planned)
    arrays = "1 array" if len(planned) == 1 else f"{len(planned)} arrays"
    most = sum(array.throttle.at_once for array in planned if array.throttle.after is None)
    bound = f", at most {most} runs at once" if most < count else ""
    say(f"Submitted {count} of {len(experiment.cells)} runs to {site.name} as {arrays}{bound}:")
    for array, planned_array in zip(submission.arrays, planned, strict=True):
        first = planned_array.throttle.after
        after = "" if first is None else f", when job {submission.arrays[first].id} has ended"
        at_once = planned_array.throttle.at_once
        say(f"  job {array.id}: {len(array.runs)} x {array.shape}, {at_once} at once{after}")
    if note := time_note(site.time):
        say(f"  {site.file}: time: {note}")
    named = os.environ.get("SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS")
    if named not in (None, "", submission.cluster):
        say(f"  on {submission.cluster}, the cluster of slurm.conf: SLURM_CLUSTERS ({named}) is not read")
    if left:
        limit = f"{site.file}: submit_limit: {site.submit_limit}"
        say(f"{left} runs exceed {limit}: launch again when others have ended, or use --wait")
    _say_next_commands(experiment)


def _say_next_commands(experiment: Experiment) -> None:
    folder = experiment.folder
    say(f"Status: {command('status', folder)}    cancel: {command('cancel', folder)}")


def follow(
    experiment: Experiment,
    site: Site,
    options: LaunchOptions,
    *,
    left: Collection[str],
    cancelled: Container[str] = (),
) -> int:
    """Show the runs' progress until SLURM has no more jobs of them; returns the command's exit code.

    Ending it does not affect the jobs.

    Args:
        experiment: the experiment.
        site: site profile.
        options: options of the launch.
        left: ids of runs that exceeded the `submit_limit`: they are submitted as jobs end.
        cancelled: ids of runs not to submit.
    """
    left = set(left)
    polls_without_job: Counter[str] = Counter()
    warned = False
    said: set[str] = set()
    with shown_progress(Display(pauses=options.pauses), quiet=options.quiet) as progress:
        while True:
            queue = SlurmQueue(experiment)
            run_statuses = [queue.run_status(run, with_accounting=False) for run in experiment.runs]
            progress([(run_status.run, run_status.status) for run_status in run_statuses])
            if queue.queued is None:
                if not warned:
                    say(f"waiting for SLURM to answer: {queue.no_answer}")
                warned = True
                time.sleep(_POLL_SECONDS)
                continue
            warned = False
            for note in hold_notes(run_statuses):
                if note not in said:
                    said.add(note)
                    say(note)
            for run_status in run_statuses:
                polls_without_job[run_status.run.id] += 1
                if run_status.is_live:
                    polls_without_job[run_status.run.id] = 0
                    left.discard(run_status.run.id)  # by another launch
            open_runs = _not_done(run_statuses, options)
            if all(polls_without_job[run_status.run.id] >= _POLLS_WITHOUT_JOB for run_status in open_runs):
                if not left:
                    break
                # Jobs that are still ending, and those of other experiments, count for the submit limit.
                if _has_room(site):
                    left = submit_missing(experiment, site, replace(options, only=left), cancelled=cancelled)
            time.sleep(_POLL_SECONDS)
    completed = len(run_statuses) - len(open_runs)
    say(f"{completed} of {len(run_statuses)} runs {_done(options)} in {experiment.folder}")
    return 0 if not open_runs else 1


def _not_done(run_statuses: Sequence[RunStatus], options: LaunchOptions) -> list[RunStatus]:
    pauses = options.pauses
    return [each for each in run_statuses if not is_done(each.status, until=pauses.get(each.run.id))]


def _done(options: LaunchOptions) -> str:
    return "completed or paused" if options.pauses else "completed"


def _has_room(site: Site) -> bool:
    try:
        return free_jobs(site) != 0
    except SlurmError:
        return False  # it is asked again at the next look
