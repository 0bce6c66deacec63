"""Settling a run: once its attempt has ended, the outcome is recorded in its status.

No process has to stay for this. The last rank to end settles the run, and so does anybody who reads the
status of a run whose processes have all vanished. Processes on other machines cannot be checked from here:
for those the scheduler is asked, or else their lease decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncpp_cli.base.console import printable
from asyncpp_cli.base.errors import DamagedError, refusal_of
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.end_row import metrics_problem
from asyncpp_cli.runs.attempts.files import Claimed, Outcome, RankEnd, RankStart, Scheduler
from asyncpp_cli.runs.attempts.outcome import outcome_of
from asyncpp_cli.runs.processes import ProcessId, is_gone, is_local
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status, state_after

SECONDS_TO_START = 120.0
"""A local rank that has not recorded its start after this time counts as never started."""


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What a caller knows of a run's attempts: of its own, as another process may have claimed the next."""

    none_to_come: int | None = None
    """Number of an attempt whose ranks that have not started never will."""
    all_over: int | None = None
    """Number of an attempt of which no rank is running any more."""
    scheduler: Scheduler | None = None
    """Asked about processes on other machines."""


NOTHING_KNOWN = Knowledge()


def settle(run: Run, knows: Knowledge = NOTHING_KNOWN) -> Status:
    """Return the run's status, after recording the outcome of an attempt that has ended.

    Raises:
        DamagedError: a file of the run is missing or cannot be read.
        OSError: the status cannot be written.
    """
    status = run.status()
    # Checked without the lock, so that readers do not wait for each other.
    if not _has_ended(status, run, knows):
        return status
    with run.locked():
        return settle_locked(run, knows)


def current_status(
    run: Run, *, none_to_come: int | None = None, scheduler: Scheduler | None = None
) -> Status:
    """A run's status, settled, without errors: a run whose files cannot be read has state `damaged` or
    `unreadable`, and one whose metrics are not complete `damaged` (`metrics_problem`).

    If the status cannot be written (another user's run, a full or read-only disk), returns what would have
    been written.
    """
    status = Status(state=State.DAMAGED)
    knows = Knowledge(none_to_come=none_to_come, scheduler=scheduler)
    try:
        try:
            status = settle(run, knows)
        except OSError:
            status = _settled(run.status(), run, knows)
        problem = "" if status.state == State.RUNNING else metrics_problem(run, status)
        return replace(status, state=State.DAMAGED, reason=printable(problem)) if problem else status
    except (DamagedError, OSError) as error:
        refusal = refusal_of(error)
        reason = printable(refusal.message if refusal else error)
        return replace(status, state=state_after(error), reason=reason)


def settle_locked(run: Run, knows: Knowledge) -> Status:
    """Settle a run (`settle`) for a caller that holds its lock."""
    status = run.status()
    settled = _settled(status, run, knows)
    if settled is not status:
        _record(Attempt(run, status.attempt), settled, at=settled.ended or 0.0, seconds=settled.seconds)
    return settled


def _record(attempt: Attempt, ended: Status, *, at: float, seconds: float | None) -> None:
    """Write the outcome of an attempt, and the run's status."""
    state, cause, reason = ended.state, ended.cause, ended.reason
    attempt.write(Outcome(state=state, cause=cause, reason=reason, time=at, seconds=seconds))
    attempt.run.write_status(ended)


def override_outcome(attempt: Attempt, *, state: State, cause: Cause, reason: str) -> Status:
    """Replace the recorded outcome of an attempt that has ended; returns the run's status."""
    with attempt.run.locked():
        status = attempt.run.status()
        if status.attempt == attempt.number:
            status = replace(status, state=state, cause=cause, reason=reason)
            before = attempt.read(Outcome)
            seconds = None if before is None else before.seconds
            _record(attempt, status, at=time.time(), seconds=seconds)
        return status


def end_rank(
    attempt: Attempt, rank: int, *, code: int | None, signal_number: int | None, stopped: bool
) -> OSError | None:
    """Record how a rank ended (see `Attempt.record_end`), and settle the run if it was the last."""
    refused = attempt.record_end(rank, code=code, signal_number=signal_number, stopped=stopped)
    with contextlib.suppress(OSError, DamagedError):
        settle(attempt.run)
    return refused


def _settled(status: Status, run: Run, knows: Knowledge) -> Status:
    """The status after the attempt's end. Writes nothing.

    `status` itself if the attempt has not ended.

    Raises:
        DamagedError: a file of the attempt is missing or cannot be read.
    """
    if not _has_ended(status, run, knows):
        return status
    attempt = Attempt(run, status.attempt)
    ends = attempt.ends(attempt.description().processes)
    state, cause, reason = outcome_of(attempt, ends, steps=status.steps)
    signs = [status.seconds, *(end.seconds for end in ends.values() if end is not None)]
    seconds = max((sign for sign in signs if sign is not None), default=None)
    now = time.time()
    settled = replace(
        status, state=state, cause=cause, reason=reason, updated=now, ended=now, seconds=seconds
    )
    if state == State.COMPLETED:
        settled = replace(settled, step=status.steps)
    if state == State.PAUSED:
        # An attempt that only evaluated has no heartbeat.
        settled = replace(settled, step=max(status.step, attempt.until or 0))
    return settled


def _has_ended(status: Status, run: Run, knows: Knowledge) -> bool:
    """Whether a running attempt has ended: as the caller knows, or by its own files and processes, the
    scheduler, or its lease."""
    if status.state != State.RUNNING:
        return False
    if knows.all_over == status.attempt:
        return True
    attempt = Attempt(run, status.attempt)
    claimed = attempt.description()
    if attempt.is_copy(claimed):
        return True
    open_ranks = set(range(claimed.processes)) - attempt.ranks_with(RankEnd)
    never_starts = knows.none_to_come == status.attempt
    if not never_starts and open_ranks - attempt.ranks_with(RankStart):
        never_starts = _launcher_is_gone(attempt, claimed)
    # The first rank that runs decides, so that few files are read however many ranks there are.
    for rank in open_ranks:
        processes = attempt.processes(rank)
        if all(map(is_gone, processes)) if processes else never_starts:
            continue
        if claimed.job is not None and knows.scheduler is not None:
            answer = knows.scheduler.is_over(claimed.job, claimed=run.age(attempt.file(Claimed)))
            if answer is not None:
                return answer
        if not _rank_is_lost(attempt, rank, processes, claimed):
            return False
    return True


def _launcher_is_gone(attempt: Attempt, claimed: Claimed) -> bool:
    """Whether the process that claimed the attempt is gone, or has not started the ranks in time."""
    if is_gone(claimed.by):
        return True
    # In a SLURM job the claiming process stays until the end, however long the ranks take to start.
    return not claimed.job and attempt.seconds() > SECONDS_TO_START


def _rank_is_lost(attempt: Attempt, rank: int, processes: Sequence[ProcessId], claimed: Claimed) -> bool:
    """Whether nobody has shown for too long that a rank on another machine is run."""
    if any(is_local(process) and not is_gone(process) for process in processes):
        return False
    if claimed.job is None:
        return bool(processes) and attempt.run.age(attempt.file(RankStart, rank)) > claimed.lease
    # SLURM may have suspended it, and its ranks may take long to start.
    file = attempt.file(RankStart, rank) if processes else attempt.file(Claimed)
    return attempt.run.age(file) > attempt.longest_silence()
