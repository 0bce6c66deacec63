"""Tuning every arm of a template with the same budget, as `asyncpp tune` does it.

On a SLURM cluster a rung of an arm is a job array, and a job that follows it promotes. No process has to
stay: what is due follows from the runs' folders, so every pass does the same, whoever makes it, the user's
command or the job that follows an array.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncpp_cli.base.console import command, say
from asyncpp_cli.base.errors import INTERRUPTED, DamagedError, UserError
from asyncpp_cli.experiment.cell_checks import check_cells
from asyncpp_cli.experiment.matrix import ResolvedCell, expand
from asyncpp_cli.experiment.own_code import confirmed as confirmed_code
from asyncpp_cli.experiment.render import render
from asyncpp_cli.experiment.template import Template, load
from asyncpp_cli.launch.common.arrays import ArrayManifest, free_jobs, plan_arrays
from asyncpp_cli.launch.common.options import LaunchOptions, flags
from asyncpp_cli.launch.start import launch_locally
from asyncpp_cli.launch.submission.sbatch import check_folder_name
from asyncpp_cli.launch.submission.submit import submit
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.sites.profile import LOCAL, Site, find_site
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue
from asyncpp_cli.slurm.submissions import submission_lock
from asyncpp_cli.tune.plan import (
    Plan,
    Question,
    parse_over,
    plan_in,
    plan_of,
    points,
    read_plan,
    template_with_points,
    write_plan,
)
from asyncpp_cli.tune.standing import ArmStanding, standings
from stages.config.records import read_record


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tuning before anything is written."""

    template: Template
    cells: list[ResolvedCell]
    plan: Plan


def planned(question: Question, *, allow_code: Sequence[str] | str = (), out: Path | None = None) -> Planned:
    """The cells and the plan of a tuning. Writes nothing.

    Args:
        question: what is tuned.
        allow_code: modules of the user's own that the template may name.
        out: folder of the experiment, which may be there; None: only plan.

    Raises:
        UserError: the template, a key or a value is not accepted.
    """
    overs = [parse_over(text) for text in question.over]
    if not overs:
        raise UserError("nothing to tune over; accepted: --over KEY=RANGE, as in optimizer.lr=1e-4:1e-1:log")
    tried = points(overs, samples=question.samples, search_seed=question.search_seed)
    # Every candidate is judged by its own loss.
    template = replace(
        template_with_points(load(question.template, question.changes), tried), speed_steps=None
    )
    typed = (*question.changes, *question.over)
    cells = expand(template, confirmed=confirmed_code(allow_code, typed, out=out))
    check_cells(template, cells)
    return Planned(template=template, cells=cells, plan=plan_of(question, cells, tried))


def write_tuning(question: Question, *, out: Path, allow_code: Sequence[str] | str = ()) -> None:
    """Make the experiment of a tuning, or check that the folder holds this one.

    Raises:
        UserError: the question is not accepted, or the folder holds something else.
    """
    known = read_plan(out)
    if known is not None and known.question != question:
        raise UserError(
            f"{out} holds another tuning ({described(known.question)}); name another folder, or go on with "
            f"it: {command('tune', out)}"
        )
    made = planned(question, allow_code=allow_code, out=out)
    rendered = render(made.template, made.cells, template_name=question.template, folder=out)
    if known is None:
        write_plan(rendered.experiment, made.plan)


def described(question: Question) -> str:
    """A question as it is asked on the command line."""
    parts = [question.template, *question.changes, *(f"--over {text}" for text in question.over)]
    parts.append(f"--samples {question.samples}")
    if question.search_seed is not None:
        parts.append(f"--search-seed {question.search_seed}")
    rungs = ",".join(f"{share:g}" for share in question.rungs)
    parts.append(f"--eta {question.eta} --rungs {rungs}" if rungs else "--grid")
    return " ".join(parts)


def go_on(folder: Path, options: LaunchOptions, *, promoting: bool = False) -> int:
    """Go on with a tuning until it is complete or nothing more can be trained; the exit code of `tune`.

    Args:
        folder: of the experiment.
        options: of the launches; `site`, `replay`, `max_parallel` and `retries` count.
        promoting: whether this is the job on a cluster that follows an array (`submit_due`).

    Raises:
        UserError: the folder is not tuned, or a run, the site or an option is not accepted.
    """
    experiment, plan = open_experiment(folder), plan_in(folder)
    profile = find_site(options.site)
    if profile.scheduler == LOCAL:
        if options.retries is not None:
            raise UserError(f"--retries is for clusters, and {options.site} is this machine")
        return _locally(experiment, plan, options)
    return _on_cluster(experiment, plan, profile, options, promoting=promoting)


def _on_cluster(
    experiment: Experiment, plan: Plan, site: Site, options: LaunchOptions, *, promoting: bool
) -> int:
    check_folder_name(experiment.folder)
    if site.submit_limit is not None and site.submit_limit < _FEWEST_JOBS:
        raise UserError(
            f"{site.file}: submit_limit: {site.submit_limit}: a tuning needs {_FEWEST_JOBS} jobs: one that "
            "promotes, a run that it submits, and the next one that promotes"
        )
    if submit_due(experiment, plan, site, options, promoting=promoting) and not promoting:
        say(f"A job that follows each array promotes. Status: {command('status', experiment.folder)}")
    return 0


def _locally(experiment: Experiment, plan: Plan, options: LaunchOptions) -> int:
    tried: set[tuple[str, int]] = set()
    while True:
        arms = standings(experiment, plan, scheduler=SlurmQueue(experiment))
        due = {run: step for each in arms for run, step in each.due.items()}
        left = {run: step for run, step in due.items() if (run, step) not in tried}
        if not left:
            return 0 if not due else 1
        counts = sorted(Counter(left.values()).items())
        say(f"Training {', '.join(f'{count} to step {step}' for step, count in counts)}")
        code = launch_locally(experiment, replace(options, only=left, pauses=left))
        if code == INTERRUPTED:
            return code
        tried |= left.items()


_FEWEST_JOBS = 3
"""Least `submit_limit` of a tuning."""
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
        max_array_size, free = slurm.cluster().max_array_size, free_jobs(site)
        count, left, live = 0, 0, set()
        for arm in standings(experiment, plan, scheduler=queue):
            statuses = [queue.run_status(experiment.run(run), with_accounting=False) for run in arm.due]
            arrays = {each.job_id.partition("_")[0] for each in statuses if each.has_job}
            waiting = [each for each in statuses if not each.is_live]
            if promoting:
                waiting = [each for each in waiting if not _was_submitted(queue, each, arm)]
            of_arm = replace(options, pauses=dict(arm.due))
            room = None if free is None else max(0, free - 1)  # one is the job that promotes
            job_arrays = plan_arrays(
                [each.run for each in waiting], site, of_arm, max_array_size=max_array_size, free_jobs=room
            )
            submitted = sum(len(array.runs) for array in job_arrays)
            left += len(waiting) - submitted
            if not submitted:
                live |= arrays
                continue
            then = _command(experiment, site, options)
            submission = submit(experiment, site, job_arrays, of_arm, live=sorted(arrays), then=then)
            count += submitted
            free = None if free is None else free - submitted - 1
            jobs = ", ".join(array.id for array in submission.arrays)
            number = "1 run" if submitted == 1 else f"{submitted} runs"
            say(f"{number} to step {max(arm.due.values())}: job {jobs}")
        if left:
            again = command("tune", experiment.folder, "--site", options.site, *flags(options))
            limit = f"{site.file}: submit_limit: {site.submit_limit} jobs at once"
            say(f"{left} exceed {limit}: a job that promotes submits them, or {again}")
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
