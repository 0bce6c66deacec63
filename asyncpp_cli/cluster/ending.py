"""Ending runs on purpose, and finding those that ended without it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence

from asyncpp_cli.cluster import slurm
from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.cancellations import record
from asyncpp_cli.cluster.job_states import Phase, phase_of
from asyncpp_cli.cluster.processes import end, user_name
from asyncpp_cli.cluster.queue import Queue, Standing
from asyncpp_cli.cluster.submissions import submitting
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs import Cause, Experiment, Run, State

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_MORE = 20.0
"""That ending may take, beside saving."""
_GRACE = 30.0
"""Of a run whose configuration cannot be read."""

_BY_ACCOUNT = {"timeout": "TIMEOUT", "oom": "OUT_OF_MEMORY"}
"""SLURM's words."""


def cancel_runs(experiment: Experiment, runs: Sequence[Run]) -> tuple[int, int]:
    """End runs and wait until they have ended. How many were waiting, and how many were going on.

    A launch that is open starts none of them any more.

    Raises:
        SlurmError: SLURM does not answer, or refuses.
    """
    ids = {run.id for run in runs}
    record(experiment, ids)
    with submitting(experiment):
        waiting = [standing for standing in _standings(experiment, ids) if _waits(standing)]
        # First of all what waits: it must not begin where another ends.
        slurm.cancel([standing.job_id for standing in waiting])
        left_alone = {standing.run.id for standing in waiting}
        going_on = [standing for standing in _standings(experiment, ids - left_alone) if _is_left(standing)]
        _tell(going_on)
        _wait(experiment, [*waiting, *going_on])
    return len(waiting), len(going_on)


def _standings(experiment: Experiment, ids: Collection[str]) -> list[Standing]:
    queue = Queue(experiment)
    queue.check_answer()
    return [queue.standing(run, with_accounting=False) for run in experiment.runs if run.id in ids]


def _waits(standing: Standing) -> bool:
    return standing.queued is not None and phase_of(standing.queued.state) is Phase.WAITS


def _is_left(standing: Standing) -> bool:
    return standing.has_job or standing.status.state == State.RUNNING


def _tell(going_on: Sequence[Standing]) -> None:
    """Ask runs to save and end."""
    for standing in going_on:
        if standing.status.state == State.RUNNING:
            attempt = Attempt(standing.run, standing.status.attempt)
            attempt.stop(f"cancelled by {user_name()}", cause=Cause.CANCELLED)
    # Beside the file, which another machine may see late.
    slurm.cancel([standing.job_id for standing in going_on if standing.has_job], signal="USR2")


def _wait(experiment: Experiment, told: Sequence[Standing]) -> None:
    """Wait for runs to have saved and ended; end by force what has not in time."""
    ids = {standing.run.id for standing in told}
    deadline = time.monotonic() + max((_grace(standing.run) for standing in told), default=0.0)
    deadline += _SECONDS_MORE
    forced = False
    while left := [standing for standing in _standings(experiment, ids) if _is_left(standing)]:
        if time.monotonic() > deadline and not forced:
            forced = True
            deadline += _SECONDS_MORE
            slurm.cancel([standing.job_id for standing in left if standing.has_job])
            for standing in left:
                _kill(standing)
        elif time.monotonic() > deadline:
            return
        # A job that was queued again meanwhile, and one that had not claimed its run yet when it was told.
        slurm.cancel([standing.job_id for standing in left if _waits(standing)])
        _tell([standing for standing in left if not _is_told(standing)])
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _is_told(standing: Standing) -> bool:
    if standing.status.state != State.RUNNING:
        return True
    stop = Attempt(standing.run, standing.status.attempt).read("stop")
    return stop is not None and stop.get("cause") == Cause.CANCELLED


def _grace(run: Run) -> float:
    try:
        return run.config().site.grace
    except DamagedError:
        return _GRACE


def _kill(standing: Standing) -> None:
    attempt = Attempt(standing.run, standing.status.attempt)
    for rank in range(len(standing.status.pids)):
        for process in attempt.processes(rank):
            if process.pid != os.getpid():
                end(process, signal.SIGKILL)


def to_retry(
    experiment: Experiment, *, named: Collection[str], failed: bool, timeout: bool, oom: bool
) -> dict[str, str]:
    """Runs to start again, each with the site where it was submitted last (empty: nowhere).

    Args:
        experiment: whose.
        named: these in any case.
        failed: those that failed, or are damaged.
        timeout: those that a time limit ended.
        oom: those that ran out of memory.
    """
    queue = Queue(experiment)
    chosen = {}
    for run in experiment.runs:
        standing = queue.standing(run, with_accounting=True)
        status = standing.status
        if status.state in (State.COMPLETED, State.RUNNING) or standing.has_job:
            continue
        wanted = run.id in named or (failed and status.state in (State.FAILED, State.DAMAGED))
        if timeout:
            wanted |= status.cause == Cause.TIME_LIMIT or standing.job_state == _BY_ACCOUNT["timeout"]
        if oom:
            wanted |= status.cause == Cause.OUT_OF_MEMORY or standing.job_state == _BY_ACCOUNT["oom"]
        if wanted:
            chosen[run.id] = standing.site
    return chosen


def why_left_alone(experiment: Experiment, named: Collection[str]) -> list[str]:
    """Why runs that were named are not started again, a line each; none of those that are."""
    queue = Queue(experiment)
    lines = []
    for run in experiment.runs:
        if run.id not in named:
            continue
        standing = queue.standing(run, with_accounting=False)
        if standing.status.state == State.COMPLETED:
            lines.append(f"{run.id} is completed: nothing is left to train")
        elif standing.status.state == State.RUNNING:
            lines.append(f"{run.id} is running on {standing.status.host}, attempt {standing.status.attempt}")
        elif standing.has_job:
            lines.append(f"{run.id} is queued as job {standing.job_id}")
    return lines
