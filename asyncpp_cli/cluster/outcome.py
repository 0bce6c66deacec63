"""How an attempt whose ranks have all ended went, and why it failed if it did."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.end_row import missing_end
from asyncpp_cli.runs import Cause, State
from stages.signals import RESUMABLE, SIGNALS

_LINES = 8
"""Of an error, for people who have not asked for the whole log."""

_NO_MEMORY = ("MemoryError", "OutOfMemoryError")
"""Python's exception and torch's, by name."""

_OTHERS_GONE = "GoneError"
"""Of `stages.member`: a rank says by it that another has ended, which has its own reason."""


def outcome_of(attempt: Attempt, ranks: int, *, steps: int) -> tuple[State, Cause, str]:
    """State, cause and reason of an attempt that is over.

    Args:
        attempt: which.
        ranks: number of its processes.
        steps: of the whole run.
    """
    ends = {rank: attempt.read(f"rank-{rank}.end") for rank in range(ranks)}
    if (refusal := attempt.read("refused")) is not None:
        return State.FAILED, Cause.REFUSED, str(refusal["reason"])
    missing = ""
    if ranks and all(end is not None and end["code"] == 0 for end in ends.values()):
        missing = missing_end(attempt.run.metrics_file, attempt=attempt.number, steps=steps)
        if not missing:
            return State.COMPLETED, Cause.NONE, ""
    if (stop := attempt.read("stop")) is not None:
        return State.INTERRUPTED, Cause(stop.get("cause", Cause.STOPPED)), str(stop["reason"])
    if ranks and all(end is not None and end["code"] == RESUMABLE for end in ends.values()):
        return State.INTERRUPTED, Cause.STOPPED, "told to end by SIGTERM or SIGUSR2"
    if missing:
        return State.FAILED, Cause.ERROR, f"its processes ended with exit code 0, but {missing}"
    cause, reason = _first_cause(attempt, ends)
    return State.FAILED, cause, reason


def _first_cause(attempt: Attempt, ends: dict[int, dict[str, Any] | None]) -> tuple[Cause, str]:
    """What ended first: a killed rank takes the others with it, and they only report that it is gone.

    A rank that is out of memory is no consequence of another's end, but its neighbours may be aborted for it.
    """
    no_memory: list[tuple[float, Cause, str]] = []
    killed: list[tuple[float, Cause, str]] = []
    erred: list[tuple[float, Cause, str]] = []
    deserted: list[tuple[float, Cause, str]] = []
    left: list[tuple[float, Cause, str]] = []
    for rank, end in ends.items():
        log = attempt.run.log_file(attempt=attempt.number, rank=rank)
        see = f" (logs/{log.name})" if log.exists() else ""
        if end is None:
            killed.append((0.0, Cause.KILLED, _silent(attempt, rank)))
            continue
        # Its own account comes first: after an exception torch may abort while the interpreter ends.
        if (error := attempt.read(f"rank-{rank}.error")) is not None:
            how = f"rank {rank}: {error['message']}{see}"
            if error.get("kind") in _NO_MEMORY:
                no_memory.append((error["time"], Cause.OUT_OF_MEMORY, how))
            else:
                by_itself = erred if error.get("kind") != _OTHERS_GONE else deserted
                by_itself.append((error["time"], Cause.ERROR, how))
        elif end["signal"] is not None and not end["stopped"]:
            how = f"rank {rank} was killed by {_signal_name(end['signal'])}{see}"
            # A signal to end that comes with another rank's failure comes of it: srun ends the others.
            (left if end["signal"] in SIGNALS else killed).append((end["time"], Cause.KILLED, how))
        elif end["code"] != 0:
            how = "was made to end"
            if not end["stopped"]:
                why = end.get("disk") or _last_line(log) or "it printed nothing"
                how = f"ended with exit code {end['code']}: {why}"
            left.append((end["time"], Cause.ERROR, f"rank {rank} {how}{see}"))
    for causes in (no_memory, killed, erred, deserted, left):
        if causes:
            _, cause, reason = min(causes)
            return cause, reason
    return Cause.ERROR, "it has no ranks"


def vanished(attempt: Attempt, ranks: int) -> str:
    """Which rank ended without a word, in words; empty if none."""
    for rank in range(ranks):
        if attempt.read(f"rank-{rank}.end") is None:
            return _silent(attempt, rank)
    return ""


def _silent(attempt: Attempt, rank: int) -> str:
    log = attempt.run.log_file(attempt=attempt.number, rank=rank)
    see = f" (logs/{log.name})" if log.exists() else ""
    started = bool(attempt.processes(rank))
    how = "vanished: killed by SIGKILL, or its machine stopped"
    if not started:
        how = "never started" + (f": {why}" if (why := _last_line(attempt.starting)) else "")
    if started and shutil.disk_usage(attempt.folder).free == 0:
        how = "ended without a word: no space is left on its disk"
    return f"rank {rank} {how}{see}"


def blamed_rank(attempt: Attempt) -> int | None:
    """The rank that ended the attempt: the first to say so of those that ended badly."""
    ends = []
    for file in attempt.folder.glob("rank-*.end.json"):
        rank = int(file.name.removeprefix("rank-").partition(".")[0])
        end = attempt.read(f"rank-{rank}.end")
        if end is not None and end["code"] != 0:
            error = attempt.read(f"rank-{rank}.error")
            no_memory = error is not None and error.get("kind") in _NO_MEMORY
            ends.append((not no_memory, error["time"] if error else end["time"], rank))
    return min(ends)[2] if ends else None


def last_lines(attempt: Attempt) -> list[str]:
    """What the rank printed last that ended the attempt."""
    rank = blamed_rank(attempt)
    if rank is None:
        return []
    log = attempt.run.log_file(attempt=attempt.number, rank=rank)
    return last_lines_of(log) if log.exists() else []


def last_lines_of(log: Path) -> list[str]:
    """The last lines of a file, for people."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line[:300] for line in lines if line.strip()][-_LINES:]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
