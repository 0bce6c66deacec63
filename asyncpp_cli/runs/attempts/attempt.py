"""One attempt at a run: its folder, with who claimed it, its ranks' processes and how they ended.

attempts/N/attempt.json      who claimed it, with how many processes (one per rank; one in all for replay)
                             and in which SLURM job, if any
attempts/N/rank-K.json       processes and node of rank K
attempts/N/rank-K.end.json   how rank K ended
attempts/N/rank-K.error.json the exception that ended rank K
attempts/N/rank-K.waits.json what rank K has waited for during half of `site.timeout` and longer
attempts/N/rank-K.energy.json  energy of rank K's GPU, if it tells
attempts/N/fallen.json       ranks that did not train to the end; watched by all supervisors
attempts/N/stop.json         request to all ranks to stop, with the reason
attempts/N/refused.json      why its job refused to start it
attempts/N/outcome.json      state, cause and reason at its end
attempts/N/starting.err      errors of the local process that starts the ranks
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.atomic_files import FULL, write_json
from asyncpp_cli.errors import DamagedError, refusal_of
from asyncpp_cli.plain_text import printable
from asyncpp_cli.runs.attempts.attempt_files import read_file
from asyncpp_cli.runs.attempts.disk_reserve import release, reserve, write_reserved
from asyncpp_cli.runs.attempts.early_exits import (
    EARLY_EXITS,
    EarlyExit,
    parse_early_exits,
    with_early_exit,
)
from asyncpp_cli.runs.attempts.job_record import Job, job_of
from asyncpp_cli.runs.processes import ProcessId, parse_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause
from stages.config import SiteConfig
from stages.liveness.stall import longest_silence
from stages.liveness.stop_signal import RESUMABLE, SIGNALS
from stages.liveness.waiting import Waiting, awaited_rank

_END = re.compile(r"rank-(\d+)\.end\.json")


@dataclass(frozen=True)
class Attempt:
    """Attempt `number` at a run."""

    run: Run
    number: int

    @property
    def folder(self) -> Path:
        return self.run.attempts / str(self.number)

    @property
    def rendezvous(self) -> Path:
        """Folder through which the ranks find each other."""
        return self.folder / "rendezvous"

    @property
    def startup_log(self) -> Path:
        """Errors of the local process that starts the ranks."""
        return self.folder / "starting.err"

    def file(self, name: str) -> Path:
        """Path of one of the attempt's JSON files."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Content of one of the attempt's JSON files; None if it is missing or damaged."""
        try:
            return read_file(self.file(name))
        except DamagedError:
            return None

    def write(self, name: str, content: dict[str, Any]) -> None:
        write_json(self.file(name), content)

    def description(self) -> dict[str, Any]:
        """Content of attempt.json.

        Raises:
            DamagedError: it is missing or cannot be read.
        """
        content = read_file(self.file("attempt"))
        if content is None:
            raise DamagedError(f"{self.file('attempt')} is missing")
        return content

    @property
    def replays(self) -> bool:
        """Whether all ranks take turns in one process."""
        content = self.read("attempt")
        return bool(content and content["replay"])

    @property
    def until(self) -> int | None:
        """Step after which it pauses; None: it trains to the end."""
        content = self.read("attempt")
        return content.get("until") if content else None

    @property
    def job(self) -> Job | None:
        """The SLURM job that the attempt runs in, if any."""
        return job_of(self.read("attempt"))

    @property
    def site_settings(self) -> dict[str, Any]:
        """Settings `site.*` of the site profile, which override the run's configuration."""
        content = self.read("attempt")
        return dict(content.get("site", {})) if content else {}

    def site(self) -> SiteConfig:
        """The `site` of this attempt: the run's, with the settings of the site profile.

        Raises:
            DamagedError: the run's configuration cannot be read.
        """
        return replace(self.run.config().site, **self.site_settings)

    def longest_silence(self) -> float:
        """Seconds without a heartbeat after which the attempt counts as stalled; the default if the run's
        configuration cannot be read."""
        try:
            return longest_silence(self.site())
        except DamagedError:
            return longest_silence(SiteConfig())

    def processes(self, rank: int) -> list[ProcessId]:
        """Processes of a rank; empty before it has started."""
        content = self.read(f"rank-{rank}")
        return [parse_process(process) for process in content["processes"]] if content else []

    def node(self, rank: int) -> str:
        """SLURM's name of the node that a rank runs on; empty if unknown."""
        content = self.read(f"rank-{rank}")
        return str(content.get("node", "")) if content else ""

    def record_start(self, rank: int, *processes: ProcessId, node: str = "") -> None:
        """Record a rank's processes: the trainer, and its supervisor if it has one.

        Args:
            rank: the rank.
            processes: its processes.
            node: SLURM's name of its node.
        """
        self.write(f"rank-{rank}", {"processes": [asdict(process) for process in processes], "node": node})
        for name in (f"rank-{rank}.error", f"rank-{rank}.end"):
            reserve(self.file(name))
        if rank == 0:
            reserve(self.file(EARLY_EXITS))
            reserve(self.file("stop"))

    def record_end(self, rank: int, *, code: int | None, signal_number: int | None, stopped: bool) -> None:
        """Record how a rank ended.

        Args:
            rank: the rank.
            code: its exit code; None if a signal ended it.
            signal_number: the signal that ended it.
            stopped: whether it was made to end: on request, or because another rank ended.
        """
        end = {"code": code, "signal": signal_number, "stopped": stopped, "time": time.time()}
        self._write_on_full_disk(f"rank-{rank}.end", end)
        release(self.file(f"rank-{rank}.error"))
        if code != 0:
            failed = not stopped and signal_number not in SIGNALS and code != RESUMABLE
            self.record_early_exit(rank, failed=failed)

    def record_error(self, rank: int, error: BaseException) -> None:
        """Record the exception that ends a rank, for the reason of the run's failure."""
        kind = type(error).__name__
        refusal = refusal_of(error) if isinstance(error, OSError) and error.filename else None
        message = printable(f"{kind}: {error}" if refusal is None else refusal.message)
        content = {"kind": kind, "message": message[:500], "time": time.time()}
        self._write_on_full_disk(f"rank-{rank}.error", content)
        self.record_early_exit(rank, failed=True)

    def record_waiting(self, rank: int, waiting: Waiting | None) -> None:
        """Record what a rank has long waited for; None: it goes on."""
        with contextlib.suppress(OSError):
            if waiting is None:
                self.file(f"rank-{rank}.waits").unlink(missing_ok=True)
            else:
                self.write(f"rank-{rank}.waits", {**waiting._asdict(), "time": time.time()})

    def waiting(self) -> dict[int, Waiting]:
        """What ranks have long waited for, by rank."""
        waits = {}
        for file in self.folder.glob("rank-*.waits.json"):
            rank = file.name.removeprefix("rank-").partition(".")[0]
            content = self.read(f"rank-{rank}.waits")
            if rank.isdecimal() and content is not None:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    waits[int(rank)] = Waiting(printable(str(content["text"])), int(content["peer"]))
        return waits

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
        early_exit = EarlyExit(rank, failed, time.time())
        if with_early_exit(self.early_exits, early_exit) is None:
            return
        with contextlib.suppress(OSError), self.run.locked():
            if (content := with_early_exit(self.early_exits, early_exit)) is not None:
                self._write_on_full_disk(EARLY_EXITS, content)

    @property
    def early_exits(self) -> list[EarlyExit]:
        """The first ranks that did not train to the end."""
        return parse_early_exits(self.read(EARLY_EXITS))

    def ends(self, ranks: int) -> dict[int, dict[str, Any] | None]:
        """How each rank ended, by rank; None where that is not recorded."""
        return {rank: self.read(f"rank-{rank}.end") for rank in range(ranks)}

    def ended_ranks(self) -> set[int]:
        """Ranks whose end is recorded; one directory listing, however many ranks there are."""
        try:
            names = [file.name for file in self.folder.iterdir()]
        except FileNotFoundError:
            return set()
        return {int(match[1]) for match in map(_END.fullmatch, names) if match is not None}

    def stop(self, reason: str, *, cause: Cause = Cause.STOPPED) -> None:
        """Request all ranks to save and end.

        Args:
            reason: for the status; the first request's is kept, unless the run is cancelled.
            cause: kind of the reason.
        """
        if cause == Cause.CANCELLED or self.read("stop") is None:
            content = {"reason": reason, "cause": cause, "time": time.time()}
            try:
                self.write("stop", content)
            except OSError as error:
                if error.errno not in FULL:
                    raise  # such as another user's run
                write_reserved(self.file("stop"), content)

    @property
    def stop_reason(self) -> str | None:
        """Reason of the stop request; None if there is none."""
        content = self.read("stop")
        return str(content["reason"]) if content else None

    def _write_on_full_disk(self, name: str, content: dict[str, Any]) -> None:
        """As `write`, but into reserved space if the disk is full; a write that still fails is ignored.

        Without the file the run is settled by whoever reads its status next.
        """
        file = self.file(name)
        try:
            self.write(name, content)
        except OSError as error:
            with contextlib.suppress(OSError):
                write_reserved(file, content | {"disk": error.strerror})
        else:
            release(file)
