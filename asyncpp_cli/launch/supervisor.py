"""Supervising one rank: the trainer is a child process of a supervisor, which records how it ends.

So every end of a rank is recorded, kill -9 included; a signal reaches every rank (submitit forwards it to
rank 0 alone); and a rank that hangs after another one has ended is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Outcome, RankEnd
from asyncpp_cli.runs.attempts.settle import end_rank, settle
from asyncpp_cli.runs.processes import ProcessId, is_gone, process_id, this_process
from asyncpp_cli.runs.status import Cause, State
from stages.liveness.stop_signal import RESUMABLE, SIGNALS

ATTEMPT_VARIABLE = "ASYNCPP_ATTEMPT"
"""Number of the attempt; set only for a trainer that has a supervisor."""

LIMIT_VARIABLE = "ASYNCPP_TIME_LIMIT_NEAR"
"""Time (seconds since 1970) from which a signal to stop is taken for the job's time limit."""

_POLL_SECONDS = 0.25
_OTHERS_POLL_SECONDS = 1.0
_SECONDS_AFTER_ANOTHER = 10.0
"""Time for a rank to notice by itself that another has ended, so that it can record its own error."""
_SECONDS_TO_END = 5.0
"""Time for a rank to end once another has failed; it cannot save without it."""
_SECONDS_FOR_OTHERS = _SECONDS_AFTER_ANOTHER + 2 * _SECONDS_TO_END
_MAX_READS_PER_SECOND = 2000
"""File reads of all supervisors of a run together, to spare the file server."""


class _Supervisor:
    """Watches one rank's trainer and the same few files of the attempt, however many ranks there are.

    A rank's early exit is announced in one file that all supervisors watch, by its own supervisor or, if that
    was killed, by the supervisor of another rank on the same machine.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        grace: float,
        received: list[signal.Signals],
    ) -> None:
        self._attempt = attempt
        self._rank = rank
        self._grace = grace
        first_here = rank - local_rank
        self._neighbours = [first_here + (local_rank + step) % local_size for step in range(1, local_size)]
        """Other ranks on this machine that are not known to have ended; the first one is checked."""
        self._processes: dict[int, tuple[ProcessId, ...]] = {}
        self._polled = self._polled_others = 0.0
        self._poll_seconds = max(_POLL_SECONDS, 2 * size / _MAX_READS_PER_SECOND)
        self._others_poll_seconds = max(_OTHERS_POLL_SECONDS, 8 * size / _MAX_READS_PER_SECOND)
        self._missing = 0
        self._received = received

    def watch(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait for the child, ending it if needed; returns whether it completed or stopped on request."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        stopped = False
        while child.poll() is None:
            if (seconds := self._seconds_left()) is not None:
                stopped = True
                _end(child, seconds=seconds)
                break
            try:
                child.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        code = child.wait()
        if not stopped and (stop_signal := self._stop_signal(code)) is not None:
            self._stop(stop_signal)
        end_rank(
            self._attempt,
            self._rank,
            code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            stopped=stopped,
        )
        # A signal kills a trainer that does not listen yet; it has nothing to save then.
        stopped_early = -code in SIGNALS and self._attempt.stop_reason is not None
        return stopped_early or code in (0, RESUMABLE)

    def _stop_signal(self, code: int) -> signal.Signals | None:
        """The signal that stopped the child before this process acted on it; SLURM signals either or both."""
        if self._another_failed():
            return None
        if -code in SIGNALS:
            return signal.Signals(-code)
        return self._received[0] if self._received and code == RESUMABLE else None

    def wait_for_others(self) -> None:
        """Give the other ranks time to end by themselves and record how.

        SLURM kills the whole job as soon as one task fails, so this task waits before it ends.
        """
        deadline = time.monotonic() + self._others_poll_seconds + _SECONDS_FOR_OTHERS
        while time.monotonic() < deadline and not self._missing:
            # Written when the last rank has ended.
            if self._attempt.read(Outcome) is not None:
                return
            self._announce_vanished()
            time.sleep(self._poll_seconds)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))

    def _seconds_left(self) -> float | None:
        """Seconds that the child has to end; None if it does not have to."""
        if self._received:
            if self._another_failed():
                return _SECONDS_TO_END
            self._stop(self._received[0])
            return self._grace
        now = time.time()
        if now - self._polled < self._poll_seconds:
            return None
        self._polled = now
        if self._attempt.stop_reason is not None:
            return self._grace
        if now - self._polled_others < self._others_poll_seconds:
            return None
        self._polled_others = now
        self._announce_vanished()
        over = self._is_removed() or self._is_superseded() or self._another_exited_long_ago(now)
        return _SECONDS_TO_END if over else None

    def _stop(self, number: signal.Signals) -> None:
        """Request all ranks to stop, because this one got the signal."""
        near = os.environ.get(LIMIT_VARIABLE)
        if near is not None and time.time() > float(near):
            reason = f"the job's time limit is near (rank {self._rank} got {number.name})"
            cause = Cause.TIME_LIMIT
        else:
            reason, cause = f"rank {self._rank} was told to end by {number.name}", Cause.STOPPED
        # This rank stops even if the request cannot be written.
        with contextlib.suppress(OSError):
            self._attempt.stop(reason, cause=cause)

    def _is_removed(self) -> bool:
        """Whether the run's folder is gone, and with it all results and stop requests."""
        try:
            self._attempt.folder.stat()
        except FileNotFoundError:
            self._missing += 1
        except OSError:
            pass  # the file server does not answer
        else:
            self._missing = 0
        return self._missing > 1

    def _is_superseded(self) -> bool:
        """Whether a later attempt is running: SLURM gave this one up, say because its node was silent."""
        try:
            status = self._attempt.run.status()
        except DamagedError:
            return False
        return status.attempt > self._attempt.number

    def _another_failed(self) -> bool:
        """Whether another rank failed before any stop request; srun then signals the others."""
        if self._attempt.stop_reason is not None:
            return False
        return any(other.failed and other.rank != self._rank for other in self._attempt.early_exits)

    def _another_exited_long_ago(self, now: float) -> bool:
        return any(
            other.rank != self._rank and now - other.time > _SECONDS_AFTER_ANOTHER
            for other in self._attempt.early_exits
        )

    def _announce_vanished(self) -> None:
        """Announce the early exit of the next local rank if its processes are gone without a record.

        Its supervisor was killed, and a trainer ends at once when its supervisor does.
        """
        while self._neighbours and self._is_gone(self._neighbours[0]):
            vanished = self._neighbours.pop(0)
            if self._attempt.read(RankEnd, vanished) is None:
                self._attempt.record_early_exit(vanished, failed=False)
                # It may have been the last rank.
                with contextlib.suppress(OSError, DamagedError):
                    settle(self._attempt.run)

    def _is_gone(self, other: int) -> bool:
        if not self._processes.get(other):
            self._processes = {other: self._attempt.processes(other)}
        return bool(self._processes[other]) and all(is_gone(process) for process in self._processes[other])


def _end(child: subprocess.Popen[bytes], *, seconds: float) -> None:
    child.terminate()
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()


def supervise(
    attempt: Attempt,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    threads: int,
    grace: float,
    devices: str | None,
    received: list[signal.Signals] | None = None,
) -> bool:
    """Run one rank of an attempt in a child process; returns whether it completed or stopped on request.

    Args:
        attempt: the attempt.
        rank: rank of the child, 0 .. size - 1.
        size: number of processes of the attempt.
        local_rank: rank among the processes on this machine.
        local_size: number of processes on this machine.
        threads: CPU threads of the child.
        grace: seconds that it may take to save and end on request.
        devices: GPUs for the attempt's processes on this machine, in CUDA_VISIBLE_DEVICES' notation; None:
            leave the environment as it is.
        received: signals received before this function installs its own handlers; may still grow.
    """
    status = attempt.run.status()
    if status.state != State.RUNNING or status.attempt != attempt.number:
        return False  # the attempt was given up meanwhile
    command = [sys.executable, "-m", "asyncpp_cli", "train", str(attempt.run.folder)]
    if attempt.replays:
        command.append("--replay")
    environment = dict(os.environ) | {
        ATTEMPT_VARIABLE: str(attempt.number),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    node = os.environ.get("SLURMD_NODENAME", "")
    try:
        with attempt.run.log_file(attempt=attempt.number, rank=rank).open("ab") as log:
            # The child ends when its standard input closes, so it does not outlive its supervisor.
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )
    except OSError as error:
        attempt.record_start(rank, this_process(), node=node)
        attempt.record_error(rank, error)
        end_rank(attempt, rank, code=1, signal_number=None, stopped=False)
        return False
    attempt.record_start(rank, process_id(child.pid), this_process(), node=node)
    supervisor = _Supervisor(
        attempt,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        grace=grace,
        received=[] if received is None else received,
    )
    ended_well = supervisor.watch(child)
    if not ended_well:
        supervisor.wait_for_others()
    return ended_well
