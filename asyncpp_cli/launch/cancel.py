"""Cancelling runs: queued jobs are removed, running ranks save and end, and open launches start none of them.

EXPERIMENT/cancelled.jsonl   append-only: every `asyncpp cancel`, with its runs, withdrawn if it failed
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from asyncpp_cli.base.atomic_files import append_line
from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import FULL
from asyncpp_cli.runs.attempts.attempt import Attempt, kill
from asyncpp_cli.runs.attempts.files import StopRequest
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import user_name
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import JobPhase, NoSlurmError, SlurmError, phase_of
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue
from asyncpp_cli.slurm.submissions import read_submissions, submission_lock
from stages.config.records import DamagedError, Record, decoded, encoded

_POLL_SECONDS = 0.5
_EXTRA_SECONDS = 20.0
"""Extra time to shut down after saving."""
_DEFAULT_GRACE = 30.0
"""Seconds to save for a run whose configuration cannot be read."""


def cancel_runs(experiment: Experiment, runs: Sequence[Run]) -> tuple[int, int]:
    """Cancel runs and wait until they have ended; returns how many were queued and how many were running.

    An open launch does not start any of them afterwards. If the disk is full, so that
    it cannot be told, they are cancelled all the same.

    Raises:
        SlurmError: SLURM does not answer, or refuses; an open launch goes on.
        OSError: an open launch cannot be told; the runs are cancelled.
    """
    ids = {run.id for run in runs}
    SlurmQueue(experiment).check_answer()
    untold = _tell_launches(experiment, ids)
    try:
        counts = _cancel(experiment, ids)
    except (SlurmError, OSError):
        with suppress(OSError):
            record_cancellation(experiment, ids, withdrawn=True)
        raise
    # Again: what has ended may have left some room.
    if untold is not None and (untold := _tell_launches(experiment, ids)) is not None:
        say(f"Cancelled: {counts[0]} queued, {counts[1]} running. An open launch may start them again:")
        raise untold
    return counts


def _tell_launches(experiment: Experiment, ids: Collection[str]) -> OSError | None:
    """Record the cancellation for open launches; the error if the disk is full."""
    try:
        record_cancellation(experiment, ids)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return error
    return None


def _cancel(experiment: Experiment, ids: set[str]) -> tuple[int, int]:
    with submission_lock(experiment):
        submissions = read_submissions(experiment).all
        follow_ups = {each.follow_up for each in submissions if each.follow_up}
        if follow_ups and ids == {run.id for run in experiment.runs}:
            # Once its arrays are gone it would submit what is left of a tuning.
            with suppress(NoSlurmError):
                slurm.cancel([job.id for job in slurm.queued_jobs(follow_ups).values()])
        pending = [run_status for run_status in _run_statuses(experiment, ids) if _is_pending(run_status)]
        # Pending jobs first: none must start on the resources that a running one frees.
        slurm.cancel([run_status.job_id for run_status in pending])
        ids_left = ids - {run_status.run.id for run_status in pending}
        running = [run_status for run_status in _run_statuses(experiment, ids_left) if run_status.is_live]
        _request_stop(running)
        _wait(experiment, [*pending, *running])
    return len(pending), len(running)


def _run_statuses(experiment: Experiment, ids: Collection[str]) -> list[RunStatus]:
    queue = SlurmQueue(experiment)
    queue.check_answer()
    return [queue.run_status(run, with_accounting=False) for run in experiment.runs if run.id in ids]


def _is_pending(run_status: RunStatus) -> bool:
    return run_status.queued is not None and phase_of(run_status.queued.state) is JobPhase.PENDING


def _request_stop(running: Sequence[RunStatus]) -> None:
    """Ask running runs to save and end."""
    for run_status in running:
        if run_status.status.state == State.RUNNING:
            attempt = Attempt(run_status.run, run_status.status.attempt)
            attempt.stop(f"cancelled by {user_name()}", cause=Cause.CANCELLED)
    # Besides the file, which another machine may see late.
    slurm.cancel([run_status.job_id for run_status in running if run_status.has_job], signal="USR2")


def _wait(experiment: Experiment, cancelled: Sequence[RunStatus]) -> None:
    """Wait until the runs have saved and ended; kill those that take too long."""
    ids = {run_status.run.id for run_status in cancelled}
    grace = max((_grace(run_status.run) for run_status in cancelled), default=0.0)
    deadline = time.monotonic() + grace + _EXTRA_SECONDS
    killed = False
    while live := [run_status for run_status in _run_statuses(experiment, ids) if run_status.is_live]:
        if time.monotonic() > deadline and not killed:
            killed = True
            deadline += _EXTRA_SECONDS
            slurm.cancel([run_status.job_id for run_status in live if run_status.has_job])
            for run_status in live:
                kill(Attempt(run_status.run, run_status.status.attempt))
        elif time.monotonic() > deadline:
            return
        # Jobs that were requeued meanwhile, and jobs that had not claimed their run when it was cancelled.
        slurm.cancel([run_status.job_id for run_status in live if _is_pending(run_status)])
        _request_stop([run_status for run_status in live if not _stop_requested(run_status)])
        time.sleep(_POLL_SECONDS)


def _stop_requested(run_status: RunStatus) -> bool:
    if run_status.status.state != State.RUNNING:
        return True
    stop = Attempt(run_status.run, run_status.status.attempt).read(StopRequest)
    return stop is not None and stop.cause == Cause.CANCELLED


def _grace(run: Run) -> float:
    try:
        return run.config().site.grace
    except DamagedError:
        return _DEFAULT_GRACE


_FILE = "cancelled.jsonl"


class Cancellation(Record, frozen=True, kw_only=True):
    """A line of the file."""

    time: float
    """Seconds since 1970."""
    by: str
    """Name of the user."""
    runs: tuple[str, ...]
    """Ids of the runs."""
    withdrawn: bool = False
    """Whether an earlier cancellation of these runs has failed, and no longer holds."""


def record_cancellation(experiment: Experiment, ids: Collection[str], *, withdrawn: bool = False) -> None:
    """Record that runs are cancelled, before any of them is ended, or that this has failed."""
    entry = Cancellation(time=time.time(), by=user_name(), runs=tuple(sorted(ids)), withdrawn=withdrawn)
    append_line(experiment.folder / _FILE, encoded(entry).decode().rstrip())


class Cancellations:
    """Ids of the runs cancelled since this object was made, by file position rather than by clock.

    Each cancellation is announced when it is first seen.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._file = experiment.folder / _FILE
        self._read_to = self._size()
        self._ids: set[str] = set()

    def __contains__(self, run_id: object) -> bool:
        if self._size() > self._read_to:
            with self._file.open("rb") as file:
                file.seek(self._read_to)
                lines = file.read().splitlines(keepends=True)
            for line in lines:
                if line.endswith(b"\n"):
                    self._read_to += len(line)
                    self._apply(line)
        return run_id in self._ids

    def _apply(self, line: bytes) -> None:
        try:
            entry = decoded(line, Cancellation, where=f"a line of {self._file}")
        except DamagedError as error:
            say(f"{error}: it cancels nothing")
            return
        if entry.withdrawn:
            self._ids.difference_update(entry.runs)
            say(f"cancelling failed for {entry.by}: this launch starts the runs all the same")
        else:
            self._ids.update(entry.runs)
            runs = "1 run" if len(entry.runs) == 1 else f"{len(entry.runs)} runs"
            say(f"{entry.by} cancelled {runs}: this launch does not start them")

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0
