"""Launching on a cluster: what is missing is submitted, and if asked for followed to its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Container, Sequence

from asyncpp_cli.cluster import slurm
from asyncpp_cli.cluster.lanes import Turn
from asyncpp_cli.cluster.queue import Queue, Standing, standings
from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.cluster.slurm import SlurmError
from asyncpp_cli.cluster.submissions import Submission, submitting
from asyncpp_cli.cluster.submit import Choices, PlannedArray, missing, plan, report_file, room, script, submit
from asyncpp_cli.console import command, say
from asyncpp_cli.progress import shown_progress
from asyncpp_cli.runs import Experiment, State

_SECONDS_BETWEEN_LOOKS = 2.0
_LOOKS_WITHOUT_A_JOB = 3
"""A job that has just ended may have been followed by its run's last word only after the look at the run."""


def show_scripts(experiment: Experiment, site: Site, choices: Choices) -> None:
    """Print the script of each array that a launch would submit now."""
    try:
        max_array_size = slurm.cluster().max_array_size
    except SlurmError as error:
        max_array_size = slurm.USUAL_MAX_ARRAY_SIZE
        say(f"{error}; arrays are cut as SLURM does if it is not told otherwise")
    runs = missing(standings(experiment), only=None)
    planned = plan(runs, site, choices, max_array_size=max_array_size)
    for array in planned:
        after = "" if array.turn.after is None else f", to begin when array {array.turn.after + 1} has ended"
        print(f"# {len(array.runs)} runs of {array.shape}{after}\n{script(experiment, site, array)}")


def submit_missing(
    experiment: Experiment,
    site: Site,
    choices: Choices,
    *,
    only: Collection[str] | None = None,
    cancelled: Container[str] = (),
) -> int:
    """Submit what is neither completed, nor going on, nor queued. How many runs that were.

    Args:
        experiment: whose runs.
        site: where.
        choices: what else was said.
        only: ids of the runs that are meant; None: all.
        cancelled: ids of runs that are not to be submitted any more.

    Raises:
        UserError: something is wrong with a run or the site; nothing is queued then.
    """
    with submitting(experiment):
        queue = Queue(experiment)
        queue.check_answer()
        found = [queue.standing(run, with_accounting=False) for run in experiment.runs]
        runs = [run for run in missing(found, only=only) if run.id not in cancelled]
        free = room(site)
        max_array_size = slurm.cluster().max_array_size
        planned = plan(runs, site, choices, max_array_size=max_array_size, room=free)
        left = len(runs) - sum(len(array.runs) for array in planned)
        if not planned:
            _say_nothing_to_do(experiment, found, left=left, site=site)
            return 0
        live = {standing.job_id.partition("_")[0] for standing in found if standing.has_job}
        submission = submit(experiment, site, planned, choices, live=sorted(live))
    _say_submitted(experiment, submission, planned, left=left, site=site)
    return sum(len(array.runs) for array in planned)


def _say_nothing_to_do(experiment: Experiment, found: Sequence[Standing], *, left: int, site: Site) -> None:
    queued = sum(standing.has_job for standing in found)
    going_on = sum(standing.status.state == State.RUNNING and not standing.has_job for standing in found)
    completed = sum(standing.status.state == State.COMPLETED for standing in found)
    say(
        f"Nothing to submit: {completed} of {len(found)} runs completed, {queued} queued or running"
        + (f", {going_on} running elsewhere" if going_on else "")
    )
    if left:
        say(f"{left} wait for room: {site.file}: submit_limit: {site.submit_limit} jobs at once")
    _say_next(experiment)


def _say_submitted(
    experiment: Experiment, submission: Submission, planned: Sequence[PlannedArray], *, left: int, site: Site
) -> None:
    count = sum(len(array.runs) for array in planned)
    arrays = "1 array" if len(planned) == 1 else f"{len(planned)} arrays"
    at_once = sum(array.turn.at_once for array in planned if array.turn.after is None)
    bound = f", at most {at_once} runs at once" if at_once < count else ""
    say(f"Submitted {count} of {len(experiment.cells)} runs to {site.name} as {arrays}{bound}:")
    for array, wanted in zip(submission.arrays, planned, strict=True):
        say(f"  job {array.id}: {len(array.runs)} x {array.shape}, {_turn(wanted.turn, submission)}")
    if left:
        limit = f"{site.file}: submit_limit: {site.submit_limit}"
        say(f"{left} runs do not fit below {limit}: launch again when others have ended, or use --wait")
    if submission.report:
        say(f"When all have ended, the report is written to {report_file(experiment)}")
    _say_next(experiment)


def _turn(turn: Turn, submission: Submission) -> str:
    after = "" if turn.after is None else f", when job {submission.arrays[turn.after].id} has ended"
    return f"{turn.at_once} at once{after}"


def _say_next(experiment: Experiment) -> None:
    folder = experiment.folder
    say(f"To look: {command('status', folder)}    to end: {command('cancel', folder)}")


def follow(experiment: Experiment, site: Site, choices: Choices, *, cancelled: Container[str] = ()) -> int:
    """Show how the runs go until SLURM has none of them any more. The command's exit code.

    It only watches: whatever ends it, the jobs go on. Where the site bounds how many jobs one may have, it
    submits the others as soon as there is room.
    """
    without_a_job: Counter[str] = Counter()
    silent = False
    with shown_progress() as progress:
        while True:
            queue = Queue(experiment)
            found = [queue.standing(run, with_accounting=False) for run in experiment.runs]
            progress.update([(standing.run, standing.status) for standing in found])
            if queue.queued is None:
                if not silent:
                    say(f"waiting for SLURM to say how the jobs stand: {queue.no_answer}")
                silent = True
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                continue
            silent = False
            for standing in found:
                without_a_job[standing.run.id] += 1
                if _goes_on(standing):
                    without_a_job[standing.run.id] = 0
            open_runs = [standing for standing in found if standing.status.state != State.COMPLETED]
            if all(without_a_job[standing.run.id] >= _LOOKS_WITHOUT_A_JOB for standing in open_runs):
                waiting = [standing.run.id for standing in open_runs if _is_new(standing)]
                if not waiting or not submit_missing(
                    experiment, site, choices, only=waiting, cancelled=cancelled
                ):
                    break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    completed = len(found) - len(open_runs)
    say(f"{completed} of {len(found)} runs completed in {experiment.folder}")
    return 0 if not open_runs else 1


def _goes_on(standing: Standing) -> bool:
    return standing.has_job or standing.status.state == State.RUNNING


def _is_new(standing: Standing) -> bool:
    """Whether it was never submitted, for lack of room."""
    return not standing.site and standing.status.state == State.PENDING
