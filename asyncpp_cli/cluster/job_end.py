"""How an attempt went as its job saw it: what ranks that were ended from outside could not write down."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.job_states import Phase
from asyncpp_cli.cluster.outcome import vanished
from asyncpp_cli.runs import Cause, State, Status
from stages.signals import RESUMABLE, SIGNALS


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """What a job knows of the end of its ranks."""

    srun_code: int | None
    """Exit code of srun, minus the signal that killed it; None where it was not started."""
    told: bool
    """The job's own process was told to end."""
    phase: Phase | None
    """Of the job, in SLURM's word; None where SLURM does not answer."""
    broken: bool
    """SLURM takes a node of the job for broken."""
    limit_near: bool
    """So near that SLURM's signal is due to the time limit."""
    limit_reached: bool
    """SLURM has ended the job for its time limit."""


def signal_of(srun_code: int | None) -> signal.Signals | None:
    """The signal to end that killed a rank, or srun itself, by srun's exit code; None if none did.

    srun ends with the highest exit code of its tasks, and a task that a signal killed has 128 and its number:
    143 for SIGTERM, 140 for SIGUSR2.
    """
    return next((number for number in SIGNALS if srun_code in (128 + number, -number)), None)


def seen_from_job(
    status: Status, attempt: Attempt, *, ranks: int, end: JobEnd
) -> tuple[State, Cause, str] | None:
    """How the attempt went, where its files alone say it wrongly; None if they are right.

    Args:
        status: as the files have it.
        attempt: which, with no process left.
        ranks: number of its processes.
        end: what the job knows.
    """
    silent = vanished(attempt, ranks)
    number = signal_of(end.srun_code)
    died_in_time = number is not None and _only_died_before_listening(attempt, ranks)
    if status.state == State.INTERRUPTED:
        # A rank died, and srun then told the others to end: nobody else had.
        alone = status.cause == Cause.STOPPED and not end.told and end.phase is Phase.RUNS
        if silent and alone and not died_in_time:
            return State.FAILED, Cause.KILLED, silent
        if status.cause == Cause.STOPPED and end.limit_reached:
            # The early signal came before there were ranks to hear it, so nobody has named the limit.
            return State.INTERRUPTED, Cause.TIME_LIMIT, f"the job's time limit is reached: {status.reason}"
        return None
    if status.state != State.FAILED or status.cause != Cause.KILLED or not silent:
        return None
    if number is not None and died_in_time:
        near = end.limit_reached or (number == signal.SIGUSR2 and end.limit_near)
        how = f"told to end by {number.name} while the ranks were starting"
        if near:
            return State.INTERRUPTED, Cause.TIME_LIMIT, f"the job's time limit is near: {how}"
        return State.INTERRUPTED, Cause.STOPPED, how
    erred = any(attempt.read(f"rank-{rank}.error") is not None for rank in range(ranks))
    ended = end.phase is not None and end.phase is not Phase.RUNS
    if ended and end.limit_reached and not erred:
        return State.INTERRUPTED, Cause.TIME_LIMIT, f"the job's time limit is reached; {silent}"
    if ended and not end.broken and not erred:
        return State.INTERRUPTED, Cause.STOPPED, f"SLURM was ending the job; {silent}"
    return None


def _only_died_before_listening(attempt: Attempt, ranks: int) -> bool:
    """Whether every rank ended as it was told to, or before it could say that it had begun."""
    for rank in range(ranks):
        end = attempt.read(f"rank-{rank}.end")
        if attempt.read(f"rank-{rank}.error") is not None:
            return False
        if end is None:
            if attempt.processes(rank):
                return False
        elif not (end["stopped"] or end["code"] in (0, RESUMABLE) or end["signal"] in SIGNALS):
            return False
    return True
