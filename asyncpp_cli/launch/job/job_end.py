"""Corrects how an attempt ended by what only its job knows.

A rank that vanishes leaves no reason. The job knows srun's exit code, SLURM's signals, the time limit and its
nodes: it tells a failure from a job that SLURM was ending.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import RankEnd, RankError
from asyncpp_cli.runs.attempts.outcome import vanished
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.slurm.client import JobPhase
from stages.liveness.stop_signal import RESUMABLE, SIGNALS


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """What a job knows about the end of its ranks."""

    srun_code: int | None
    """Exit code of srun, negative if a signal killed it; None if it was not started."""
    signalled: bool
    """The array task itself received a signal to stop."""
    phase: JobPhase | None
    """Phase of the job; None if SLURM does not answer."""
    broken: str
    """Which nodes of the job are down or failing; empty if none is."""
    limit_near: bool
    """The time limit is so near that SLURM's signal is due to it."""
    limit_reached: bool
    """The time limit has passed."""


def corrected_outcome(
    status: Status, attempt: Attempt, *, ranks: int, end: JobEnd
) -> tuple[State, Cause, str] | None:
    """The corrected state, cause and reason of an attempt; None if the recorded ones are right.

    Args:
        status: the recorded status.
        attempt: the attempt, with no process left.
        ranks: number of its processes.
        end: what the job knows.
    """
    unrecorded = vanished(attempt, ranks)
    number = signal_of(end.srun_code)
    if number is not None and not _all_stopped_or_not_started(attempt, ranks):
        number = None
    if status.state == State.INTERRUPTED and status.cause == Cause.STOPPED:
        # A rank died, and the stop signal came only from srun, which then ends the other ranks.
        by_srun = not end.signalled and end.phase is JobPhase.RUNNING and number is None
        if unrecorded and by_srun:
            return State.FAILED, Cause.KILLED, unrecorded
        if end.limit_reached:
            # The early signal came before there were ranks to attribute it to the time limit.
            return State.INTERRUPTED, Cause.TIME_LIMIT, f"the job's time limit is reached: {status.reason}"
    if status.state != State.FAILED or status.cause == Cause.REFUSED:
        return None
    if end.broken:
        return State.INTERRUPTED, Cause.RESTARTED, f"{end.broken}; {status.reason}"
    if status.cause != Cause.KILLED or not unrecorded:
        return None
    if number is not None:
        how = f"told to end by {number.name} while the ranks were starting"
        if end.limit_reached or (number == signal.SIGUSR2 and end.limit_near):
            return State.INTERRUPTED, Cause.TIME_LIMIT, f"the job's time limit is near: {how}"
        return State.INTERRUPTED, Cause.STOPPED, how
    if end.phase in (None, JobPhase.RUNNING) or attempt.by_rank(RankError):
        return None
    if end.limit_reached:
        return State.INTERRUPTED, Cause.TIME_LIMIT, f"the job's time limit is reached; {unrecorded}"
    return State.INTERRUPTED, Cause.STOPPED, f"SLURM was ending the job; {unrecorded}"


def signal_of(srun_code: int | None) -> signal.Signals | None:
    """The stop signal that killed a rank or srun itself, from srun's exit code; None if none did.

    srun exits with the highest exit code of its tasks; a task killed by a signal has 128 plus its number: 143
    for SIGTERM, 140 for SIGUSR2.
    """
    return next((number for number in SIGNALS if srun_code in (128 + number, -number)), None)


def _all_stopped_or_not_started(attempt: Attempt, ranks: int) -> bool:
    """Whether every rank stopped on request, completed, or ended before it recorded its start."""
    for rank in range(ranks):
        end = attempt.read(RankEnd, rank)
        if attempt.read(RankError, rank) is not None:
            return False
        if end is None:
            if attempt.processes(rank):
                return False
        elif not (end.stopped or end.code in (0, RESUMABLE) or end.signal in SIGNALS):
            return False
    return True
