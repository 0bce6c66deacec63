"""The outcome of an attempt whose ranks have all ended: state, cause and reason."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.end_row import missing_row
from asyncpp_cli.runs.attempts.files import NO_SPACE, RankEnd, RankError, Refused, StopRequest
from asyncpp_cli.runs.status import Cause, State
from stages.liveness.stop_signal import RESUMABLE, SIGNALS

_LINES = 8
"""Lines of a log to show with an error."""

_NO_MEMORY = ("MemoryError", "OutOfMemoryError")
"""Names of Python's exception and torch's."""

_OTHER_RANK_GONE = "GoneError"
"""Name of `stages.comm.rendezvous.client`'s error: the rank ended because another one had."""


def outcome_of(
    attempt: Attempt, ends: Mapping[int, RankEnd | None], *, steps: int
) -> tuple[State, Cause, str]:
    """State, cause and reason of an attempt that has ended.

    Args:
        attempt: the attempt.
        ends: how its ranks ended (`Attempt.ends`).
        steps: steps of the whole run.
    """
    if (refusal := attempt.read(Refused)) is not None:
        return State.FAILED, Cause.REFUSED, refusal.reason
    missing = ""
    if ends and all(end is not None and end.code == 0 for end in ends.values()):
        metrics, until = attempt.run.metrics_file, attempt.until
        if until is not None and until < steps:
            kind, step, state = "pause", until, State.PAUSED
        else:
            kind, step, state = "end", steps, State.COMPLETED
        missing = missing_row(metrics, kind, attempt=attempt.number, step=step)
        if not missing:
            return state, Cause.NONE, ""
    if (stop := attempt.read(StopRequest)) is not None:
        return State.INTERRUPTED, stop.cause, stop.reason
    if ends and all(end is not None and end.code == RESUMABLE for end in ends.values()):
        return State.INTERRUPTED, Cause.STOPPED, "told to end by SIGTERM or SIGUSR2"
    if missing:
        return State.FAILED, Cause.ERROR, f"its processes ended with exit code 0, but {missing}"
    cause, reason = _first_cause(attempt, ends)
    return State.FAILED, cause, reason


def _first_cause(attempt: Attempt, ends: Mapping[int, RankEnd | None]) -> tuple[Cause, str]:
    """The end that caused the others.

    Out of memory comes first, since other ranks may abort because of it; then killed ranks, errors, errors
    because another rank was gone, and the rest. Within each group, the earliest (`_when`).
    """
    causes: list[tuple[_Group, _When, Cause, str]] = []
    when = _when(attempt)
    for rank, end in ends.items():
        log = attempt.log_file(rank)
        see = f" (logs/{log.name})" if log.exists() else ""
        if end is None:
            causes.append((_Group.KILLED, (-1, 0.0), Cause.KILLED, _unrecorded_end(attempt, rank)))
            continue
        # The recorded exception takes precedence: torch may abort while the interpreter shuts down after it.
        if (error := attempt.read(RankError, rank)) is not None:
            group = _Group.ORPHANED if error.kind == _OTHER_RANK_GONE else _Group.FAILED
            cause = Cause.ERROR
            if error.kind in _NO_MEMORY:
                group, cause = _Group.NO_MEMORY, Cause.OUT_OF_MEMORY
            elif error.kind == NO_SPACE:
                cause = Cause.NO_SPACE
            causes.append((group, when(rank, error.time), cause, f"rank {rank}: {error.message}{see}"))
        elif end.signal is not None and not end.stopped:
            how = f"rank {rank} was killed by {_signal_name(end.signal)}{see}"
            # SIGTERM after another rank's failure is a consequence: srun ends the others.
            group = _Group.OTHER if end.signal in SIGNALS else _Group.KILLED
            causes.append((group, when(rank, end.time), Cause.KILLED, how))
        elif end.code != 0:
            how = "was made to end"
            if not end.stopped:
                why = _last_line(log) or "it printed nothing"
                how = f"ended with exit code {end.code}: {why}"
            causes.append((_Group.OTHER, when(rank, end.time), Cause.ERROR, f"rank {rank} {how}{see}"))
    if not causes:
        return Cause.ERROR, "it has no ranks"
    _, _, cause, reason = min(causes)
    awaited = attempt.awaited() if cause == Cause.ERROR else ""
    return cause, f"{awaited}; {reason}" if awaited else reason


class _Group(IntEnum):
    """Ends of ranks, those that cause others first."""

    NO_MEMORY = 0
    KILLED = 1
    FAILED = 2
    ORPHANED = 3
    OTHER = 4


_When = tuple[int, float]


def _when(attempt: Attempt) -> Callable[[int, float], _When]:
    """What sorts ranks by when they ended: those that were the first to say so, in the order in which they
    did; the others, each at a time of its own machine's clock."""
    order = {early_exit.rank: place for place, early_exit in enumerate(attempt.early_exits)}
    return lambda rank, at: (order.get(rank, len(order)), at)


def vanished(attempt: Attempt, ranks: int) -> str:
    """Describes the first rank that did not record its end; empty if there is none."""
    for rank in range(ranks):
        if attempt.read(RankEnd, rank) is None:
            return _unrecorded_end(attempt, rank)
    return ""


def _unrecorded_end(attempt: Attempt, rank: int) -> str:
    log = attempt.log_file(rank)
    see = f" (logs/{log.name})" if log.exists() else ""
    no_room = "no space is left on its disk" if shutil.disk_usage(attempt.folder).free == 0 else ""
    how = "vanished: killed by SIGKILL, or its machine stopped"
    if (claimed := attempt.claimed) is not None and attempt.is_copy(claimed):
        how = "was running when the folder was copied"
    elif not attempt.processes(rank):
        why = _last_line(attempt.startup_log) or no_room
        how = "never started" + (f": {why}" if why else "")
    elif no_room:
        how = f"ended without a record: {no_room}"
    return f"rank {rank} {how}{see}"


def blamed_rank(attempt: Attempt) -> int | None:
    """The rank that ended the attempt: out of memory if any, else the first that failed."""
    ends = []
    when = _when(attempt)
    for rank, end in attempt.by_rank(RankEnd).items():
        if end.code != 0:
            error = attempt.read(RankError, rank)
            no_memory = error is not None and error.kind in _NO_MEMORY
            ends.append((not no_memory, when(rank, error.time if error else end.time), rank))
    return min(ends)[2] if ends else None


def last_lines(attempt: Attempt) -> list[str]:
    """The last lines printed by the rank that ended the attempt."""
    rank = blamed_rank(attempt)
    return [] if rank is None else tail(attempt.log_file(rank))


def tail(log: Path) -> list[str]:
    """The last non-empty lines of a file, each cut to 300 characters; none if it is missing."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [line[:300] for line in lines if line.strip()][-_LINES:]


def _last_line(log: Path) -> str:
    return (tail(log) or [""])[-1].strip()


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
