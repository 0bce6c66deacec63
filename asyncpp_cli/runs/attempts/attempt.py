"""One attempt at a run: its folder, with who claimed it, its ranks' processes and how they ended.

The files are declared in `runs.attempts.files`. Whoever runs a rank renews its lease: it touches the file of
the rank's start, again and again. Where processes cannot be checked, on other machines and in other
containers, a rank whose file is older than the lease is lost (`Run.age`: no two clocks are compared). A
process that was only frozen finds the next attempt's folder, and writes nothing any more
(`runs.attempts.recorder`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.base.console import printable
from asyncpp_cli.base.errors import (
    DamagedError,
    TakenOverError,
    UserError,
    lacks_memory,
    lacks_space,
    refusal_of,
)
from asyncpp_cli.runs.attempts.files import (
    NO_SPACE,
    AttemptFile,
    Claimed,
    EarlyExit,
    EarlyExits,
    Job,
    RankEnd,
    RankError,
    RankStart,
    RankWaits,
    StopRequest,
)
from asyncpp_cli.runs.processes import ProcessId, is_gone, is_local, seconds_since, send_signal
from asyncpp_cli.runs.run_folder import Inside, Run, is_copy, modified
from asyncpp_cli.runs.status import Cause
from stages.config.records import read_record
from stages.config.run_config import SiteConfig
from stages.liveness.stop_signal import RESUMABLE, SIGNALS
from stages.liveness.watchdog import Waiting, awaited_rank, longest_silence

Kind = TypeVar("Kind", bound=AttemptFile)


@dataclass(frozen=True)
class Attempt:
    """Attempt `number` at a run."""

    run: Run
    number: int

    @property
    def folder(self) -> Path:
        return self.run.attempts / str(self.number)

    rendezvous = Inside("rendezvous")
    """Folder through which the ranks find each other."""
    startup_log = Inside("starting.err")
    """Errors of the local process that starts the ranks."""

    def log_file(self, rank: int) -> Path:
        """Output of a rank."""
        return self.run.logs / f"attempt-{self.number}-rank-{rank}.log"

    def file(self, kind: type[AttemptFile], rank: int | None = None) -> Path:
        """Path of one of the attempt's files."""
        return self.folder / f"{kind.file_name.format(rank)}.json"

    def read(self, kind: type[Kind], rank: int | None = None) -> Kind | None:
        """One of the attempt's files; None if it is missing or damaged."""
        try:
            return read_record(self.file(kind, rank), kind)
        except (FileNotFoundError, DamagedError):
            return None

    def write(self, record: AttemptFile, rank: int | None = None) -> None:
        """Write one of the attempt's files."""
        write_record(self.file(type(record), rank), record)

    def ranks_with(self, kind: type[AttemptFile]) -> set[int]:
        """Ranks that have a file of this kind; one directory listing, however many ranks there are."""
        before, after = f"{kind.file_name}.json".split("{}")
        try:
            names = [file.name for file in self.folder.iterdir()]
        except FileNotFoundError:
            return set()
        ranks = [name[len(before) : -len(after)] for name in names if name.endswith(after)]
        return {int(rank) for rank in ranks if rank.isascii() and rank.isdigit() and len(rank) < 10}

    def by_rank(self, kind: type[Kind]) -> dict[int, Kind]:
        """The readable files of a kind, by rank."""
        files = {rank: self.read(kind, rank) for rank in sorted(self.ranks_with(kind))}
        return {rank: file for rank, file in files.items() if file is not None}

    def description(self) -> Claimed:
        """Content of attempt.json.

        Raises:
            DamagedError: it is missing or cannot be read.
        """
        try:
            return read_record(self.file(Claimed), Claimed)
        except FileNotFoundError:
            raise DamagedError(f"{self.file(Claimed)} is missing") from None

    @property
    def claimed(self) -> Claimed | None:
        """Content of attempt.json; None if it is missing or damaged."""
        return self.read(Claimed)

    @property
    def until(self) -> int | None:
        """Step after which it pauses; None: it trains to the end."""
        return None if (claimed := self.claimed) is None else claimed.until

    @property
    def job(self) -> Job | None:
        """The SLURM job that the attempt runs in, if any."""
        return None if (claimed := self.claimed) is None else claimed.job

    def is_copy(self, claimed: Claimed) -> bool:
        """Whether this is another run's attempt, copied with it: the processes are those of the original."""
        return is_local(claimed.by) and is_copy(self.folder, of=claimed.folder)

    def site(self) -> SiteConfig:
        """The `site` of this attempt: the run's, with the settings of the site profile.

        Raises:
            DamagedError: the run's configuration cannot be read.
        """
        claimed = self.claimed
        return replace(self.run.config().site, **(claimed.site if claimed else {}))

    def seconds(self) -> float:
        """Seconds since it was claimed: by the monotonic clock of the machine that claimed it, elsewhere by
        that of the file server."""
        claimed = self.claimed
        if claimed is not None and claimed.monotonic is not None:
            seconds = seconds_since(claimed.monotonic, claimed.by)
            if seconds is not None:
                return seconds
        return self.run.age(self.file(Claimed))

    def longest_silence(self) -> float:
        """Seconds without a heartbeat after which the attempt counts as stalled; the default if the run's
        configuration cannot be read."""
        try:
            return longest_silence(self.site())
        except DamagedError:
            return longest_silence(SiteConfig())

    def processes(self, rank: int) -> tuple[ProcessId, ...]:
        """Processes of a rank; empty before it has started."""
        start = self.read(RankStart, rank)
        return start.processes if start else ()

    def record_start(self, rank: int, *processes: ProcessId, node: str = "") -> None:
        """Record a rank's processes: the trainer, and its supervisor if it has one.

        Args:
            rank: the rank.
            processes: its processes.
            node: SLURM's name of its node.
        """
        self.write(RankStart(processes=processes, node=node), rank)

    def record_end(
        self, rank: int, *, code: int | None, signal_number: int | None, stopped: bool
    ) -> OSError | None:
        """Record how a rank ended; returns why that could not be written.

        Args:
            rank: the rank.
            code: its exit code; None if a signal ended it.
            signal_number: the signal that ended it.
            stopped: whether it was made to end: on request, or because another rank ended.
        """
        seconds = self.seconds()
        end = RankEnd(code=code, signal=signal_number, stopped=stopped, time=time.time(), seconds=seconds)
        refused = self._write_if_possible(end, rank)
        if code != 0:
            failed = not stopped and signal_number not in SIGNALS and code != RESUMABLE
            self.record_early_exit(rank, failed=failed)
        return refused

    def record_error(self, rank: int, error: BaseException) -> None:
        """Record the exception that ends a rank, for the reason of the run's failure."""
        kind = type(error).__name__
        if lacks_memory(error):
            kind = "MemoryError"
        elif lacks_space(error):
            kind = NO_SPACE
        told = isinstance(error, UserError) or (isinstance(error, OSError) and error.filename)
        refusal = refusal_of(error) if told else None
        message = printable(f"{type(error).__name__}: {error}" if refusal is None else refusal.message)
        self._write_if_possible(RankError(kind=kind, message=message[:500], time=time.time()), rank)
        self.record_early_exit(rank, failed=True)

    def record_waiting(self, rank: int, waiting: Waiting | None) -> None:
        """Record what a rank has long waited for; None: it goes on."""
        with contextlib.suppress(OSError):
            if waiting is None:
                self.file(RankWaits, rank).unlink(missing_ok=True)
            else:
                self.write(RankWaits(text=waiting.text, peer=waiting.peer, time=time.time()), rank)

    def waiting(self) -> dict[int, Waiting]:
        """What ranks have long waited for, by rank."""
        waits = self.by_rank(RankWaits)
        return {rank: Waiting(printable(wait.text), wait.peer) for rank, wait in waits.items()}

    def awaited(self) -> str:
        """Which rank all that wait wait for, and how the first of them does; empty if that is not one."""
        waits = self.waiting()
        awaited = awaited_rank({rank: waiting.peer for rank, waiting in waits.items()})
        if awaited is None:
            return ""
        first = min(waits, key=lambda rank: (waits[rank].peer != awaited, rank))
        return f"all wait for rank {awaited}: rank {first} {waits[first].text}"

    def record_early_exit(self, rank: int, *, failed: bool) -> None:
        """Announce to all supervisors that a rank did not train to the end.

        Args:
            rank: the rank.
            failed: whether it failed by itself.
        """
        new = EarlyExit(rank=rank, failed=failed)
        if self._early_exits.with_exit(new) is None:
            return
        with contextlib.suppress(OSError), self.run.locked():
            if (exits := self._early_exits.with_exit(new)) is not None:
                self._write_if_possible(exits)

    @property
    def _early_exits(self) -> EarlyExits:
        return self.read(EarlyExits) or EarlyExits()

    @property
    def early_exits(self) -> tuple[EarlyExit, ...]:
        """The first ranks that did not train to the end."""
        return self._early_exits.fallen

    def ends(self, ranks: int) -> dict[int, RankEnd | None]:
        """How each rank ended, by rank; None where that is not recorded."""
        return {rank: self.read(RankEnd, rank) for rank in range(ranks)}

    def stop(self, reason: str, *, cause: Cause = Cause.STOPPED) -> None:
        """Request all ranks to save and end.

        Args:
            reason: for the status; the first request's is kept, unless the run is cancelled.
            cause: kind of the reason.
        """
        if cause == Cause.CANCELLED or self.read(StopRequest) is None:
            request = StopRequest(reason=reason, cause=cause, time=time.time())
            self.write(request)

    @property
    def stop_reason(self) -> str | None:
        """Reason of the stop request; None if there is none."""
        request = self.read(StopRequest)
        return request.reason if request else None

    def _write_if_possible(self, record: AttemptFile, rank: int | None = None) -> OSError | None:
        """Write a record; where the disk is full returns the error, and whoever reads the run's status next
        settles it."""
        try:
            self.write(record, rank)
        except OSError as refused:
            return refused
        return None


RENEWALS = 6
"""Number of renewals within a lease."""


def renew(attempt: Attempt, ranks: Iterable[int]) -> None:
    """Show that these ranks are still run."""
    for rank in ranks:
        # The file server may be away for a moment, and the folder removed.
        with contextlib.suppress(OSError):
            os.utime(attempt.file(RankStart, rank))


def renewed_at(attempt: Attempt) -> dict[int, float]:
    """When each rank was started or last renewed, by the file server's clock."""
    times = {}
    for rank in attempt.ranks_with(RankStart):
        with contextlib.suppress(OSError):
            times[rank] = modified(attempt.file(RankStart, rank))
    return times


def last_sign(attempt: Attempt) -> float | None:
    """Seconds since a rank showed that it runs; None if all have ended, or are gone from this machine."""
    ages = [
        attempt.run.age(attempt.file(RankStart, rank))
        for rank in attempt.ranks_with(RankStart) - attempt.ranks_with(RankEnd)
        if not all(map(is_gone, attempt.processes(rank)))
    ]
    return min(ages, default=None)


def kill(attempt: Attempt) -> None:
    """Kill the processes of all ranks on this machine, but for this one."""
    for rank in attempt.ranks_with(RankStart):
        for process in attempt.processes(rank):
            if process.pid != os.getpid():
                send_signal(process, signal.SIGKILL)


def is_superseded(attempt: Attempt) -> bool:
    """Whether the next attempt has begun."""
    try:
        # Listed, because a network file system may remember that a name was missing.
        return str(attempt.number + 1) in os.listdir(attempt.run.attempts)  # noqa: PTH208
    except OSError:
        return False


def taken_over(attempt: Attempt) -> TakenOverError:
    """The error of an attempt that `is_superseded`."""
    return TakenOverError(
        f"{attempt.run.folder}: attempt {attempt.number} was given up, because this machine was silent for "
        f"longer than site.lease; attempt {attempt.number + 1} has begun, and this one ends"
    )
