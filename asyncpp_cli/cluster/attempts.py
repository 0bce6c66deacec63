"""One attempt at a run: who claimed it, which processes its ranks are, how they ended, and so how it ended.

    attempts/N/attempt.json      who claimed it, with how many processes (ranks, but in replay one for all)
                                 and in which job of a cluster, if in one
    attempts/N/rank-K.json       the processes of rank K, and its node
    attempts/N/rank-K.end.json   how rank K ended
    attempts/N/rank-K.error.json the exception that ended it, by its own account
    attempts/N/fallen.json       which ranks did not train to their end: where all others look
    attempts/N/stop.json         its ranks are to end, and why
    attempts/N/refused.json      why its job would not begin it
    attempts/N/outcome.json      how it went
    attempts/N/starting.err      what was printed by the process that starts the ranks on this machine

Nobody has to watch an attempt: the last rank to end settles the run's status, and whoever looks at a run
whose processes have all vanished settles it as well. Processes of another machine cannot be looked at: where
they belong to a job of a cluster, that is asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.attempt_files import read_file
from asyncpp_cli.cluster.fallen import FALLEN, Fall, falls_in, with_fall
from asyncpp_cli.cluster.jobs import Job, Scheduler, job_of
from asyncpp_cli.cluster.last_word import release, reserve, write_reserved
from asyncpp_cli.cluster.processes import ProcessId, is_gone, is_here, process_from
from asyncpp_cli.errors import DamagedError, refusal_of
from asyncpp_cli.files import write_json
from asyncpp_cli.plain_text import printable
from asyncpp_cli.runs import Cause, Run, State, Status
from stages.signals import RESUMABLE, SIGNALS

_END = re.compile(r"rank-(\d+)\.end\.json")

SECONDS_TO_START = 120.0
"""A rank of which nothing is heard for so long after the claim is taken not to have started."""

SECONDS_OF_SILENCE = 3600.0
"""An attempt on another machine is taken to be gone after that, where no scheduler can be asked."""


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

    @property
    def starting(self) -> Path:
        """What was printed by the process that starts the ranks on this machine."""
        return self.folder / "starting.err"

    def read(self, name: str) -> dict[str, Any] | None:
        """One of the attempt's JSON files, if it is there and whole."""
        try:
            return read_file(self._file(name))
        except DamagedError:
            return None

    def write(self, name: str, content: dict[str, Any]) -> None:
        write_json(self._file(name), content)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def processes(self, rank: int) -> list[ProcessId]:
        """The processes of a rank: none before it has started."""
        content = self.read(f"rank-{rank}")
        return [process_from(process) for process in content["processes"]] if content else []

    def description(self) -> dict[str, Any]:
        """Who claimed it, with how many processes.

        Raises:
            DamagedError: that is not there, or cannot be read.
        """
        content = read_file(self._file("attempt"))
        if content is None:
            raise DamagedError(f"{self._file('attempt')} is missing")
        return content

    @property
    def replays(self) -> bool:
        """Whether all ranks take turns in one process."""
        content = self.read("attempt")
        return bool(content and content["replay"])

    def node(self, rank: int) -> str:
        """The node of a cluster that a rank runs on, by SLURM's name; empty where that is not known."""
        content = self.read(f"rank-{rank}")
        return str(content.get("node", "")) if content else ""

    def rank_started(self, rank: int, *processes: ProcessId, node: str = "") -> None:
        """Say which processes a rank is: the one that trains, and its supervisor where it has one.

        Args:
            rank: which.
            processes: of it.
            node: of a cluster that it runs on, by SLURM's name.
        """
        self.write(f"rank-{rank}", {"processes": [asdict(process) for process in processes], "node": node})
        for name in (f"rank-{rank}.error", f"rank-{rank}.end"):
            reserve(self._file(name))
        if rank == 0:
            reserve(self._file(FALLEN))

    def rank_ended(self, rank: int, *, code: int | None, signal_number: int | None, stopped: bool) -> None:
        """Say how a rank ended, and settle the run's status if it was the last.

        Args:
            rank: which.
            code: its exit code, unless a signal ended it.
            signal_number: the signal that ended it.
            stopped: whether it was made to end, for another rank's or a person's sake.
        """
        end = {"code": code, "signal": signal_number, "stopped": stopped, "time": time.time()}
        self._write_last(f"rank-{rank}.end", end)
        release(self._file(f"rank-{rank}.error"))
        if code != 0:
            self.rank_fell(rank, failed=not stopped and signal_number not in SIGNALS and code != RESUMABLE)
        with contextlib.suppress(OSError, DamagedError):
            settle(self.run)

    def rank_erred(self, rank: int, error: BaseException) -> None:
        """Keep the exception that ends a rank, for the reason of the run's failure."""
        kind = type(error).__name__
        refusal = refusal_of(error) if isinstance(error, OSError) and error.filename else None
        message = printable(f"{kind}: {error}" if refusal is None else refusal.message)
        self._write_last(f"rank-{rank}.error", {"kind": kind, "message": message[:500], "time": time.time()})
        self.rank_fell(rank, failed=True)

    def rank_fell(self, rank: int, *, failed: bool) -> None:
        """Tell all other ranks, in one place, that one did not train to its end.

        Args:
            rank: which.
            failed: whether by itself.
        """
        fall = Fall(rank, failed, time.time())
        if with_fall(self.fallen, fall) is None:
            return
        with contextlib.suppress(OSError), locked(self.run):
            if (content := with_fall(self.fallen, fall)) is not None:
                self._write_last(FALLEN, content)

    @property
    def fallen(self) -> list[Fall]:
        """The first ranks that did not train to their end."""
        return falls_in(self.read(FALLEN))

    def ended_ranks(self) -> set[int]:
        """The ranks that have said how they ended: one look at the folder, however many they are."""
        try:
            names = [file.name for file in self.folder.iterdir()]
        except FileNotFoundError:
            return set()
        return {int(match[1]) for match in map(_END.fullmatch, names) if match is not None}

    def _write_last(self, name: str, content: dict[str, Any]) -> None:
        """As `write`, of what a rank says as it ends; on a full disk into the room that was taken for it.

        Where that is not there either, the run's folder is gone perhaps, whoever looks settles the run.
        """
        file = self._file(name)
        try:
            self.write(name, content)
        except OSError as error:
            with contextlib.suppress(OSError):
                write_reserved(file, content | {"disk": error.strerror})
        else:
            release(file)

    def stop(self, reason: str, *, cause: Cause = Cause.STOPPED) -> None:
        """Ask all ranks to end.

        Args:
            reason: why; the first one stays, unless the run is cancelled.
            cause: the same in a word.
        """
        if cause == Cause.CANCELLED or self.read("stop") is None:
            self.write("stop", {"reason": reason, "cause": cause, "time": time.time()})

    @property
    def job(self) -> Job | None:
        """The job of a cluster that it runs in."""
        return job_of(self.read("attempt"))

    @property
    def site_settings(self) -> dict[str, Any]:
        """Settings `site.*` of the place where it runs, instead of those of the run's configuration."""
        content = self.read("attempt")
        return dict(content.get("site", {})) if content else {}

    @property
    def stop_reason(self) -> str | None:
        """Why the ranks are to end, if they are."""
        content = self.read("stop")
        return str(content["reason"]) if content else None


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Keep others from changing the run's status."""
    with run.lock_file.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # A filesystem without locks. Claims need none; what else is written here is written whole, and
            # any of two writers has the right of it.
            yield
            return
        yield


def settle(
    run: Run, *, none_to_come: bool = False, all_over: bool = False, scheduler: Scheduler | None = None
) -> Status:
    """The run's status; if its attempt is over and nobody has said so yet, it is said now.

    Args:
        run: which.
        none_to_come: ranks that have not started will not.
        all_over: nor does any rank run any more.
        scheduler: is asked where the processes cannot be looked at.
    """
    status = run.status()
    if status.state != State.RUNNING:
        return status
    # Who only looks does not wait for others that look: a rank has said how it ended before it looks here.
    if not all_over and not _is_attempt_over(status, run, none_to_come=none_to_come, scheduler=scheduler):
        return status
    with locked(run):
        return settle_locked(run, none_to_come=none_to_come, all_over=all_over, scheduler=scheduler)


def look(run: Run, *, none_to_come: bool = False, scheduler: Scheduler | None = None) -> Status:
    """As `settle`, for those who watch: nothing that is wrong with one run is an error for them.

    A run whose files cannot be read is damaged. Where its status cannot be written (somebody else's run, a
    full or read-only disk), it is what would be written.
    """
    try:
        try:
            return settle(run, none_to_come=none_to_come, scheduler=scheduler)
        except OSError:
            return _settled(run.status(), run, none_to_come=none_to_come, scheduler=scheduler)
    except DamagedError as error:
        return Status(state=State.DAMAGED, reason=printable(error))
    except OSError as error:
        refusal = refusal_of(error)
        return Status(state=State.DAMAGED, reason=printable(refusal.message if refusal else error))


def settle_locked(
    run: Run,
    *,
    none_to_come: bool = False,
    all_over: bool = False,
    scheduler: Scheduler | None = None,
) -> Status:
    """As `settle`, by who holds the lock."""
    status = run.status()
    settled = _settled(status, run, none_to_come=none_to_come, all_over=all_over, scheduler=scheduler)
    if settled is not status:
        outcome = {"state": settled.state, "cause": settled.cause, "reason": settled.reason}
        Attempt(run, status.attempt).write("outcome", outcome | {"time": settled.ended})
        run.write_status(settled)
        release(run.attempts / str(status.attempt) / f"{FALLEN}.json")
    return settled


def _settled(
    status: Status,
    run: Run,
    *,
    none_to_come: bool,
    all_over: bool = False,
    scheduler: Scheduler | None,
) -> Status:
    """The status of a run whose attempt is over, if it is: else `status` itself. Nothing is written.

    Raises:
        DamagedError: what it is judged by is missing, or cannot be read.
    """
    from asyncpp_cli.cluster.outcome import outcome_of

    if status.state != State.RUNNING:
        return status
    if not all_over and not _is_attempt_over(status, run, none_to_come=none_to_come, scheduler=scheduler):
        return status
    attempt = Attempt(run, status.attempt)
    state, cause, reason = outcome_of(attempt, attempt.description()["processes"], steps=status.steps)
    ended = time.time()
    settled = replace(status, state=state, cause=cause, reason=reason, updated=ended, ended=ended)
    if state == State.COMPLETED:
        settled = replace(settled, step=status.steps)
    return settled


def _is_attempt_over(status: Status, run: Run, *, none_to_come: bool, scheduler: Scheduler | None) -> bool:
    attempt = Attempt(run, status.attempt)
    description = attempt.description()
    missing = none_to_come or _will_not_start(status, description)
    silent = set(range(description["processes"])) - attempt.ended_ranks()
    if all(_is_over(attempt, rank, missing=missing) for rank in silent):
        return True
    return _asked(attempt, status, description, scheduler)


def settle_again(attempt: Attempt, *, state: State, cause: Cause, reason: str) -> Status:
    """Say how an attempt that is over went, by who knows better than its files."""
    with locked(attempt.run):
        status = attempt.run.status()
        if status.attempt == attempt.number:
            status = replace(status, state=state, cause=cause, reason=reason)
            outcome = {"state": state, "cause": cause, "reason": reason, "time": time.time()}
            attempt.write("outcome", outcome)
            attempt.run.write_status(status)
        return status


def _will_not_start(status: Status, description: Mapping[str, Any]) -> bool:
    if is_gone(process_from(description["by"])):
        return True
    # A cluster may take its time; there the process that claims stays until the end.
    return not description.get("job") and time.time() - (status.started or 0.0) > SECONDS_TO_START


def _is_over(attempt: Attempt, rank: int, *, missing: bool) -> bool:
    """Whether a rank is that has not said how it ended."""
    processes = attempt.processes(rank)
    return all(is_gone(process) for process in processes) if processes else missing


def _asked(
    attempt: Attempt,
    status: Status,
    description: Mapping[str, Any],
    scheduler: Scheduler | None,
) -> bool:
    """Whether an attempt is over of which some processes are on other machines."""
    job = job_of(description)
    if job is not None and scheduler is not None:
        known = scheduler.is_over(job, claimed=float(description["claimed"]))
        if known is not None:
            return known
    if time.time() - (status.updated or 0.0) <= SECONDS_OF_SILENCE:
        return False
    ranks = range(description["processes"])
    return not any(
        is_here(process) and not is_gone(process) for rank in ranks for process in attempt.processes(rank)
    )
