"""Tuning on a SLURM cluster: a rung of an arm is a job array, and a job that follows it promotes.

No process has to stay. What is due follows from the runs' folders, so every pass does the same, whoever makes
it: the user's command, or the job that follows an array.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.launch.common.arrays import ArrayManifest, plan_arrays
from asyncpp_cli.launch.common.options import LaunchOptions, flags
from asyncpp_cli.launch.submission.submit import submit
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.sites.profile import Site
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue
from asyncpp_cli.slurm.submissions import submission_lock
from asyncpp_cli.tune.plan import Plan
from asyncpp_cli.tune.standing import ArmStanding, standings
from stages.config.records import read_record

PROMOTE = "--promote"
"""Flag of the command in the job that follows an array."""


def submit_due(
    experiment: Experiment,
    plan: Plan,
    site: Site,
    options: LaunchOptions,
    *,
    promoting: bool,
) -> int:
    """Submit the due runs of every arm that have no job, each arm as arrays with a job that promotes.

    Args:
        experiment: that is tuned.
        plan: its plan.
        site: site profile.
        options: of the launch, without pauses.
        promoting: whether this is the job that follows an array. It submits a run once for each rung: one
            that was cancelled, or that failed beyond its retries, waits for a person.

    Returns:
        The number of runs submitted.

    Raises:
        UserError: a run or the profile is invalid, or SLURM refuses.
    """
    with submission_lock(experiment):
        queue = SlurmQueue(experiment)
        queue.check_answer()
        max_array_size = slurm.cluster().max_array_size
        count, live = 0, set()
        for arm in standings(experiment, plan, scheduler=queue):
            statuses = [queue.run_status(experiment.run(run), with_accounting=False) for run in arm.due]
            arrays = {each.job_id.partition("_")[0] for each in statuses if each.has_job}
            waiting = [each for each in statuses if not each.is_live]
            if promoting:
                waiting = [each for each in waiting if not _was_submitted(queue, each, arm)]
            runs = [each.run for each in waiting]
            if not runs:
                live |= arrays
                continue
            of_arm = replace(options, pauses=dict(arm.due))
            planned = plan_arrays(runs, site, of_arm, max_array_size=max_array_size)
            then = _command(experiment, site, options)
            submission = submit(experiment, site, planned, of_arm, live=sorted(arrays), then=then)
            count += len(runs)
            jobs = ", ".join(array.id for array in submission.arrays)
            number = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
            say(f"{number} to step {max(arm.due.values())}: job {jobs}")
        if live and not count and not _another_follows(queue):
            # The process that submitted them was killed before it submitted the job that promotes.
            submit(experiment, site, [], options, live=sorted(live), then=_command(experiment, site, options))
    return count


def _command(experiment: Experiment, site: Site, options: LaunchOptions) -> Sequence[str]:
    """Words of the command that goes on when arrays have ended."""
    site_file = str(site.file.absolute())
    return ["tune", str(experiment.folder.absolute()), "--site", site_file, PROMOTE, *flags(options)]


def _was_submitted(queue: SlurmQueue, each: RunStatus, arm: ArmStanding) -> bool:
    """Whether the run's latest job was for its present rung."""
    task = queue.submissions.array_tasks.get(each.run.id)
    if task is None:
        return False
    try:
        row = read_record(task.submission.folder / task.array.file, ArrayManifest).rows[task.index]
    except (DamagedError, FileNotFoundError, IndexError):
        return False
    return row.until == arm.due[each.run.id]


def _another_follows(queue: SlurmQueue) -> bool:
    """Whether a job that promotes is queued or running, other than the one that this process is in."""
    names = {submission.follow_up for submission in queue.submissions.all if submission.follow_up}
    own = os.environ.get("SLURM_JOB_NAME")
    return any(name != own for name, _ in slurm.queued_jobs(names))
