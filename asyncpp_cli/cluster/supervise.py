"""Watching over one rank: the process that trains is a child of one that does little else.

So every end of a rank has a witness, a kill -9 too, on any kind of cluster; a signal reaches every rank,
where submitit would only tell rank 0; and a rank whose neighbour has ended is ended as well, should it hang.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from asyncpp_cli.cluster.attempts import Attempt, settle
from asyncpp_cli.cluster.processes import ProcessId, is_gone, process_id, this_process
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs import Cause, State
from stages.signals import RESUMABLE, SIGNALS

ATTEMPT_VARIABLE = "ASYNCPP_ATTEMPT"
"""Number of the attempt, for the process that trains: it is set if, and only if, that has a supervisor."""

LIMIT_VARIABLE = "ASYNCPP_TIME_LIMIT_NEAR"
"""When, in seconds since 1970, a job's time limit is so near that a signal to end is due to it."""

_SECONDS_BETWEEN_LOOKS = 0.25
_SECONDS_BETWEEN_LOOKS_AT_OTHERS = 1.0
_SECONDS_AFTER_ANOTHER = 10.0
"""How long a rank may take to notice by itself that another has ended: its own account of it is kept then."""
_SECONDS_TO_END = 5.0
"""How long a rank may take to end once another has failed: it has nobody left to save with."""
_SECONDS_FOR_OTHERS = _SECONDS_AFTER_ANOTHER + 2 * _SECONDS_TO_END
_LOOKS_A_SECOND = 2000
"""Of the supervisors of all ranks together, at files of the run: these may be one server's."""


class _Supervisor:
    """Looks at the same few files of the attempt, however many ranks there are.

    Who sees a rank fall says so in one file, at which all others look. That is its own supervisor; where that
    was killed it is the supervisor of another rank on the same machine.
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
        told: list[signal.Signals],
    ) -> None:
        self._attempt = attempt
        self._rank = rank
        self._grace = grace
        first_here = rank - local_rank
        self._neighbours = [first_here + (local_rank + step) % local_size for step in range(1, local_size)]
        """The other ranks on this machine whose processes have not ended, as far as is known: the next one is
        looked at."""
        self._processes: dict[int, list[ProcessId]] = {}
        self._looked = self._looked_at_others = 0.0
        self._between_looks = max(_SECONDS_BETWEEN_LOOKS, 2 * size / _LOOKS_A_SECOND)
        self._between_looks_at_others = max(_SECONDS_BETWEEN_LOOKS_AT_OTHERS, 8 * size / _LOOKS_A_SECOND)
        self._missing = 0
        self._told = told

    def watch(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait for the child to end, or make it. Whether it trained to the end, or ended as it was told."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        stopped = False
        while child.poll() is None:
            if (seconds := self._seconds_left()) is not None:
                stopped = True
                _end(child, seconds=seconds)
                break
            try:
                child.wait(_SECONDS_BETWEEN_LOOKS)
            except subprocess.TimeoutExpired:
                continue
        code = child.wait()
        if not stopped and (told_by := self._told_to_end(code)) is not None:
            self._stop(told_by)
        self._attempt.rank_ended(
            self._rank,
            code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            stopped=stopped,
        )
        # Before it listens a signal ends it at once: it had nothing to save then.
        told = -code in SIGNALS and self._attempt.stop_reason is not None
        return told or code in (0, RESUMABLE)

    def _told_to_end(self, code: int) -> signal.Signals | None:
        """The signal to end that reached the child and not this process, or both before anybody looked.

        A cluster signals both, or one of them.
        """
        if self._another_failed():
            return None
        if -code in SIGNALS:
            return signal.Signals(-code)
        return self._told[0] if self._told and code == RESUMABLE else None

    def wait_for_others(self) -> None:
        """Give the other ranks the time to end by themselves and to say how.

        A cluster ends the whole job as soon as one rank fails, and then none of them could.
        """
        deadline = time.monotonic() + self._between_looks_at_others + _SECONDS_FOR_OTHERS
        while time.monotonic() < deadline and not self._missing:
            # The last of them has written it.
            if self._attempt.read("outcome") is not None:
                return
            self._tell_of_vanished()
            time.sleep(self._between_looks)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told.append(signal.Signals(number))

    def _seconds_left(self) -> float | None:
        """How long the child may take to end, if it has to."""
        if self._told:
            if self._another_failed():
                return _SECONDS_TO_END
            self._stop(self._told[0])
            return self._grace
        now = time.time()
        if now - self._looked < self._between_looks:
            return None
        self._looked = now
        if self._attempt.stop_reason is not None:
            return self._grace
        if now - self._looked_at_others < self._between_looks_at_others:
            return None
        self._looked_at_others = now
        self._tell_of_vanished()
        over = self._is_removed() or self._is_overtaken() or self._another_fell_long_ago(now)
        return _SECONDS_TO_END if over else None

    def _stop(self, number: signal.Signals) -> None:
        """Say why all ranks are to end: this one got the signal."""
        near = os.environ.get(LIMIT_VARIABLE)
        if near is not None and time.time() > float(near):
            reason = f"the job's time limit is near (rank {self._rank} got {number.name})"
            cause = Cause.TIME_LIMIT
        else:
            reason, cause = f"rank {self._rank} was told to end by {number.name}", Cause.STOPPED
        # Where it cannot be written, this rank ends all the same.
        with contextlib.suppress(OSError):
            self._attempt.stop(reason, cause=cause)

    def _is_removed(self) -> bool:
        """Whether the run's folder is gone: what is trained would be lost, and it cannot be told to end."""
        try:
            self._attempt.folder.stat()
        except FileNotFoundError:
            self._missing += 1
        except OSError:
            pass  # a file server that does not answer for a while
        else:
            self._missing = 0
        return self._missing > 1

    def _is_overtaken(self) -> bool:
        """Whether another attempt goes on: a cluster has given this one up, say since its node was silent."""
        try:
            status = self._attempt.run.status()
        except DamagedError:
            return False
        return status.attempt > self._attempt.number

    def _another_failed(self) -> bool:
        """Whether another rank failed before this one was told to end: srun does that to the others then."""
        if self._attempt.stop_reason is not None:
            return False
        return any(fall.failed and fall.rank != self._rank for fall in self._attempt.fallen)

    def _another_fell_long_ago(self, now: float) -> bool:
        return any(
            fall.rank != self._rank and now - fall.time > _SECONDS_AFTER_ANOTHER
            for fall in self._attempt.fallen
        )

    def _tell_of_vanished(self) -> None:
        """Tell of the next rank on this machine if its processes are gone without a word: its supervisor was
        killed, and then it ends at once by itself."""
        while self._neighbours and self._is_gone(self._neighbours[0]):
            vanished = self._neighbours.pop(0)
            if self._attempt.read(f"rank-{vanished}.end") is None:
                self._attempt.rank_fell(vanished, failed=False)
                # It may have been the last.
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
    told: list[signal.Signals] | None = None,
) -> bool:
    """Run one rank of an attempt in a child process. Whether that trained to the end, or ended as told.

    Args:
        attempt: which.
        rank: of the child, 0 .. size - 1.
        size: number of processes of the attempt.
        local_rank: among those on this machine.
        local_size: number of those on this machine.
        threads: CPU threads of the child.
        grace: seconds that it may take to save and end once it is told to.
        devices: GPUs of the attempt's processes on this machine, as CUDA_VISIBLE_DEVICES takes them; None:
            as the environment has it.
        told: signals to end that have come, or come before this function listens by itself.
    """
    status = attempt.run.status()
    if status.state != State.RUNNING or status.attempt != attempt.number:
        return False  # so late that it was given up
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
            # The child ends when its standard input does: it does not outlive its supervisor.
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )
    except OSError as error:
        attempt.rank_started(rank, this_process(), node=node)
        attempt.rank_erred(rank, error)
        attempt.rank_ended(rank, code=1, signal_number=None, stopped=False)
        return False
    attempt.rank_started(rank, process_id(child.pid), this_process(), node=node)
    supervisor = _Supervisor(
        attempt,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        grace=grace,
        told=[] if told is None else told,
    )
    ended_well = supervisor.watch(child)
    if not ended_well:
        supervisor.wait_for_others()
    return ended_well
