"""One attempt at a run: who claimed it, which processes its ranks are, how they ended, and so how it ended.

    attempts/N/attempt.json      who claimed it, with how many processes (ranks, but in replay one for all)
    attempts/N/rank-K.json       the processes of rank K
    attempts/N/rank-K.end.json   how rank K ended
    attempts/N/rank-K.error.json the exception that ended it, by its own account
    attempts/N/stop.json         its ranks are to end, and why

A run is executed at most once at a time: an attempt is claimed under a lock, and only while none is going on.
Nobody has to watch an attempt: the last rank to end settles the run's status, and whoever looks at a run
whose processes have all vanished settles it as well.
"""

from __future__ import annotations

import fcntl
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.processes import ProcessId, is_gone, is_here, this_process
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.runs import FORMAT, Run, State, Status
from stages.signals import RESUMABLE

SECONDS_TO_START = 120.0
"""A rank of which nothing is heard for so long after the claim is taken not to have started."""

SECONDS_OF_SILENCE = 3600.0
"""An attempt on another machine, which cannot be looked at, is taken to be gone after that."""


@dataclass(frozen=True)
class Attempt:
    """The folder of attempt `number` at a run."""

    run: Run
    number: int

    @property
    def folder(self) -> Path:
        return self.run.attempts / str(self.number)

    @property
    def rendezvous(self) -> Path:
        """Where the ranks of this attempt find each other."""
        return self.folder / "rendezvous"

    def read(self, name: str) -> dict[str, Any] | None:
        """One of the attempt's JSON files, if it is there and whole."""
        try:
            return read_json(self.folder / f"{name}.json", newest_format=FORMAT)
        except (FileNotFoundError, DamagedError):
            return None

    def write(self, name: str, content: dict[str, Any]) -> None:
        write_json(self.folder / f"{name}.json", content)

    def processes(self, rank: int) -> list[ProcessId]:
        """The processes of a rank: none before it has started."""
        content = self.read(f"rank-{rank}")
        return [ProcessId(**process) for process in content["processes"]] if content else []

    @property
    def replays(self) -> bool:
        """Whether all ranks take turns in one process."""
        content = self.read("attempt")
        return bool(content and content["replay"])

    def rank_started(self, rank: int, *processes: ProcessId) -> None:
        """Say which processes a rank is: the one that trains, and its supervisor where it has one."""
        self.write(f"rank-{rank}", {"processes": [asdict(process) for process in processes]})

    def rank_ended(self, rank: int, *, code: int | None, signal_number: int | None, stopped: bool) -> None:
        """Say how a rank ended, and settle the run's status if it was the last.

        Args:
            rank: which.
            code: its exit code, unless a signal ended it.
            signal_number: the signal that ended it.
            stopped: whether it was made to end, for another rank's or a person's sake.
        """
        self.write(
            f"rank-{rank}.end",
            {"code": code, "signal": signal_number, "stopped": stopped, "time": time.time()},
        )
        settle(self.run)

    def rank_erred(self, rank: int, error: BaseException) -> None:
        """Keep the exception that ends a rank, for the reason of the run's failure."""
        message = " ".join(f"{type(error).__name__}: {error}".split())
        self.write(f"rank-{rank}.error", {"message": message[:500], "time": time.time()})

    def stop(self, reason: str) -> None:
        """Ask all ranks to end."""
        if self.read("stop") is None:
            self.write("stop", {"reason": reason, "time": time.time()})

    @property
    def stop_reason(self) -> str | None:
        """Why the ranks are to end, if they are."""
        content = self.read("stop")
        return str(content["reason"]) if content else None


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    with run.lock_file.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def claim(run: Run, *, processes: int, replay: bool, steps: int) -> Attempt | None:
    """Begin the next attempt at a run; None if the run is completed, or going on elsewhere.

    Args:
        run: which.
        processes: that the attempt will have.
        replay: whether its ranks take turns in one process.
        steps: of the whole run.
    """
    with _locked(run):
        status = _settle(run)
        if status.state in (State.COMPLETED, State.RUNNING):
            return None
        attempt = Attempt(run, status.attempt + 1)
        # Left over where a claim was killed before it wrote the status.
        while attempt.folder.exists():
            attempt = Attempt(run, attempt.number + 1)
        attempt.folder.mkdir(parents=True)
        run.logs.mkdir(exist_ok=True)
        me = this_process()
        now = time.time()
        attempt.write(
            "attempt",
            {"format": FORMAT, "processes": processes, "replay": replay, "claimed": now, "by": asdict(me)},
        )
        run.write_status(
            Status(
                state=State.RUNNING,
                attempt=attempt.number,
                steps=steps,
                started=now,
                updated=now,
                host=me.host,
                pids=[0] * processes,
            )
        )
        return attempt


def enter(attempt: Attempt, rank: int) -> None:
    """Put this process into the run's status, as that rank.

    Raises:
        RuntimeError: the attempt is over, or another has taken its place.
    """
    with _locked(attempt.run):
        status = attempt.run.status()
        if status.state != State.RUNNING or status.attempt != attempt.number:
            raise RuntimeError(f"attempt {attempt.number} at {attempt.run.folder} is over: {status.state}")
        me = this_process()
        pids = [me.pid if index == rank else pid for index, pid in enumerate(status.pids)]
        attempt.run.write_status(replace(status, pids=pids, host=me.host, updated=time.time()))


def settle(run: Run, *, none_to_come: bool = False) -> Status:
    """The run's status; if its attempt is over and nobody has said so yet, it is said now.

    Args:
        run: which.
        none_to_come: ranks that have not started will not.
    """
    status = run.status()
    if status.state != State.RUNNING:
        return status
    with _locked(run):
        return _settle(run, none_to_come=none_to_come)


def look(run: Run, *, none_to_come: bool = False) -> Status:
    """As `settle`, for those who watch.

    A status that cannot be read is a failure, and one that cannot be written is taken as it stands.
    """
    try:
        try:
            return settle(run, none_to_come=none_to_come)
        except PermissionError:
            return run.status()
    except DamagedError as error:
        return Status(state=State.FAILED, reason=str(error))


def _settle(run: Run, *, none_to_come: bool = False) -> Status:
    status = run.status()
    if status.state != State.RUNNING:
        return status
    attempt = Attempt(run, status.attempt)
    description = attempt.read("attempt")
    ranks = int(description["processes"]) if description else 0
    claimer = ProcessId(**description["by"]) if description else None
    overdue = time.time() - (status.started or 0.0) > SECONDS_TO_START
    silent = time.time() - (status.updated or 0.0) > SECONDS_OF_SILENCE
    missing = none_to_come or overdue or (claimer is not None and is_gone(claimer))
    if not all(_is_over(attempt, rank, missing=missing, silent=silent) for rank in range(ranks)):
        return status
    state, reason = _outcome(attempt, ranks)
    ended = time.time()
    settled = replace(status, state=state, reason=reason, updated=ended, ended=ended)
    if state == State.COMPLETED:
        settled = replace(settled, step=status.steps)
    run.write_status(settled)
    return settled


def _is_over(attempt: Attempt, rank: int, *, missing: bool, silent: bool) -> bool:
    if attempt.read(f"rank-{rank}.end") is not None:
        return True
    processes = attempt.processes(rank)
    if not processes:
        return missing
    return all(is_gone(process) or (silent and not is_here(process)) for process in processes)


def _outcome(attempt: Attempt, ranks: int) -> tuple[State, str]:
    """How an attempt whose ranks have all ended went, and why it failed if it did."""
    ends = {rank: attempt.read(f"rank-{rank}.end") for rank in range(ranks)}
    if ranks and all(end is not None and end["code"] == 0 for end in ends.values()):
        return State.COMPLETED, ""
    if (reason := attempt.stop_reason) is not None:
        return State.INTERRUPTED, reason
    if ranks and all(end is not None and end["code"] == RESUMABLE for end in ends.values()):
        return State.INTERRUPTED, "told to end by SIGTERM or SIGUSR2"
    return State.FAILED, _first_cause(attempt, ends)


def _first_cause(attempt: Attempt, ends: dict[int, dict[str, Any] | None]) -> str:
    """What ended first: a killed rank takes the others with it, and they only report that it is gone."""
    killed: list[tuple[float, str]] = []
    erred: list[tuple[float, str]] = []
    left: list[tuple[float, str]] = []
    for rank, end in ends.items():
        log = attempt.run.log_file(attempt=attempt.number, rank=rank)
        see = f" (logs/{log.name})" if log.exists() else ""
        if end is None:
            started = bool(attempt.processes(rank))
            how = "vanished: killed by SIGKILL, or its machine stopped" if started else "never started"
            killed.append((0.0, f"rank {rank} {how}{see}"))
            continue
        # Its own account comes first: after an exception torch may abort while the interpreter ends.
        if (error := attempt.read(f"rank-{rank}.error")) is not None:
            erred.append((error["time"], f"rank {rank}: {error['message']}{see}"))
        elif end["signal"] is not None and not end["stopped"]:
            killed.append((end["time"], f"rank {rank} was killed by {_signal_name(end['signal'])}{see}"))
        elif end["code"] != 0:
            how = (
                "was made to end"
                if end["stopped"]
                else f"ended with exit code {end['code']}: {_last_line(log)}"
            )
            left.append((end["time"], f"rank {rank} {how}{see}"))
    for causes in (killed, erred, left):
        if causes:
            return min(causes)[1]
    return "it has no ranks"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
