"""Supervising the ranks of an attempt on one machine: each trainer is a child process, whose end is recorded.

So every end of a rank is recorded, kill -9 included; a signal reaches every rank; and a rank that hangs after
another one has ended is killed. On this machine one supervisor starts all ranks; on a cluster srun starts one
for each rank, and ends the others should one vanish.

python -m asyncpp_cli.launch.common.supervisor RUN_DIR ATTEMPT SIZE DEVICES   all ranks, on these GPUs
python -m asyncpp_cli.launch.common.supervisor RUN_DIR ATTEMPT                the rank of srun's environment
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from asyncpp_cli.launch.common import early_signals

if TYPE_CHECKING:
    from asyncpp_cli.runs.attempts.attempt import Attempt

ATTEMPT_VARIABLE = "ASYNCPP_ATTEMPT"
"""Number of the attempt; set only for a trainer that has a supervisor."""

LIMIT_VARIABLE = "ASYNCPP_TIME_LIMIT_NEAR"
"""Seconds after the start of the ranks from which a signal to stop is taken for the job's time limit."""

TAKEN_OVER = 3
"""Exit code if a later attempt began before this one had ended."""

_WAIT_SECONDS = 0.05
_POLL_SECONDS = 0.25
_OTHERS_POLL_SECONDS = 1.0
_SECONDS_AFTER_ANOTHER = 10.0
"""Time for a rank to notice by itself that another has ended, so that it can record its own error."""
_SECONDS_TO_END = 5.0
"""Time for a rank to end once another has failed; it cannot save without it."""
_SECONDS_FOR_OTHERS = _SECONDS_AFTER_ANOTHER + 2 * _SECONDS_TO_END
_SECONDS_TO_RECORD = 60.0
"""Time for a file system that is read-only, or does not answer, to take a rank's end."""
_MAX_READS_PER_SECOND = 2000
"""File reads of all supervisors of a run together, to spare the file server."""


class Supervisor:
    """Watches trainers, and the same few files of the attempt, however many ranks there are.

    Args:
        attempt: the attempt.
        children: the trainers, by rank.
        size: number of processes of the attempt, here and elsewhere.
        grace: seconds that they may take to save and end on request.
        lease: seconds of silence after which another machine may take over the run.
        received: signals received before this object installs its own handlers; may still grow.
    """

    def __init__(
        self,
        attempt: Attempt,
        children: dict[int, subprocess.Popen[bytes]],
        *,
        size: int,
        grace: float,
        lease: float,
        received: list[signal.Signals],
    ) -> None:
        self._attempt = attempt
        self._children = dict(children)
        self._all_here = len(children) == size
        self._grace = grace
        self._polled = self._polled_others = -math.inf
        self._exits_seen: dict[int, float] = {}
        """When this process first saw that a rank had not trained to the end, by the monotonic clock."""
        self._poll_seconds = max(_POLL_SECONDS, 2 * size / _MAX_READS_PER_SECOND)
        self._others_poll_seconds = max(_OTHERS_POLL_SECONDS, 8 * size / _MAX_READS_PER_SECOND)
        self._missing = 0
        self._received = received
        self._lease = lease
        self._limit_near = time.monotonic() + float(os.environ.get(LIMIT_VARIABLE, "inf"))
        self._renewed = -lease
        self.taken_over = False
        """Whether a later attempt began before this one had ended."""

    def watch(self) -> bool:
        """Wait for the trainers, ending them if needed; whether all completed or stopped on request."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        kill_at: float | None = None
        ended_well = True
        while self._children:
            for rank, child in list(self._children.items()):
                if (code := child.poll()) is not None:
                    ended_well &= self._end(rank, code, stopped=kill_at is not None)
                    del self._children[rank]
            self._renew()
            if kill_at is not None and time.monotonic() > kill_at:
                for child in self._children.values():
                    child.kill()
            if kill_at is None and self._children and (seconds := self._seconds_left()) is not None:
                kill_at = time.monotonic() + seconds
                for child in self._children.values():
                    child.terminate()
            time.sleep(_WAIT_SECONDS if self._children else 0)
        if not (ended_well or self._all_here):
            self._wait_for_others()
        return ended_well

    def _renew(self) -> None:
        from asyncpp_cli.runs.attempts.attempt import RENEWALS, renew

        now = time.monotonic()
        if now - self._renewed > self._lease / RENEWALS:
            self._renewed = now
            renew(self._attempt, self._children)

    def _end(self, rank: int, code: int, *, stopped: bool) -> bool:
        """Record how a trainer ended; returns whether it completed or stopped on request."""
        from asyncpp_cli.base.errors import FULL
        from asyncpp_cli.runs.attempts.attempt import is_superseded
        from asyncpp_cli.runs.attempts.settle import end_rank
        from stages.liveness.stop_signal import RESUMABLE, SIGNALS

        self.taken_over |= is_superseded(self._attempt)
        if not stopped and (stop_signal := self._stop_signal(rank, code)) is not None:
            self._stop(rank, stop_signal)
        if code != 0:
            self._exits_seen.setdefault(rank, time.monotonic())  # a full disk does not tell it
        signal_number = -code if code < 0 else None
        record = partial(
            end_rank,
            self._attempt,
            rank,
            code=code if code >= 0 else None,
            signal_number=signal_number,
            stopped=stopped,
        )
        refused = record()
        # Without the record the run would count as killed; a full disk is told apart by whoever settles it.
        deadline = time.monotonic() + _SECONDS_TO_RECORD
        while (
            refused and refused.errno not in FULL and time.monotonic() < deadline and not self._is_removed()
        ):
            time.sleep(_OTHERS_POLL_SECONDS)
            refused = record()
        # A signal kills a trainer that does not listen yet; it has nothing to save then.
        stopped_early = signal_number in SIGNALS and self._attempt.stop_reason is not None
        return stopped_early or code in (0, RESUMABLE)

    def _stop_signal(self, rank: int, code: int) -> signal.Signals | None:
        """The signal that stopped a trainer before this process acted on it; SLURM signals either or both."""
        from stages.liveness.stop_signal import RESUMABLE, SIGNALS

        if self._another_failed(rank):
            return None
        if -code in SIGNALS:
            return signal.Signals(-code)
        return self._received[0] if self._received and code == RESUMABLE else None

    def _wait_for_others(self) -> None:
        """Give the ranks elsewhere time to end by themselves and record how.

        SLURM kills the whole job as soon as one task fails, so this task waits before it ends.
        """
        from asyncpp_cli.runs.attempts.files import Outcome

        deadline = time.monotonic() + self._others_poll_seconds + _SECONDS_FOR_OTHERS
        while time.monotonic() < deadline and not self._is_removed():
            # Written when the last rank has ended.
            if self._attempt.read(Outcome) is not None:
                return
            time.sleep(self._poll_seconds)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))

    def _seconds_left(self) -> float | None:
        """Seconds that the trainers have to end; None if they do not have to."""
        from asyncpp_cli.runs.attempts.attempt import is_superseded

        if self._received:
            if any(self._another_failed(rank) for rank in self._children):
                return _SECONDS_TO_END
            self._stop(min(self._children), self._received[0])
            return self._grace
        now = time.monotonic()
        if now - self._polled < self._poll_seconds:
            return None
        self._polled = now
        if self._attempt.stop_reason is not None:
            return self._grace
        if now - self._polled_others < self._others_poll_seconds:
            return None
        self._polled_others = now
        over = self._is_removed() or is_superseded(self._attempt) or self._another_exited_long_ago(now)
        return _SECONDS_TO_END if over else None

    def _stop(self, rank: int, number: signal.Signals) -> None:
        """Request all ranks to stop, because one of them got the signal."""
        from asyncpp_cli.runs.status import Cause

        if time.monotonic() > self._limit_near:
            reason = f"the job's time limit is near (rank {rank} got {number.name})"
            cause = Cause.TIME_LIMIT
        else:
            reason, cause = f"rank {rank} was told to end by {number.name}", Cause.STOPPED
        # The trainers stop even if the request cannot be written.
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

    def _another_failed(self, rank: int) -> bool:
        """Whether another rank failed before any stop request; srun then signals the others."""
        if self._attempt.stop_reason is not None:
            return False
        return any(other.failed and other.rank != rank for other in self._attempt.early_exits)

    def _another_exited_long_ago(self, now: float) -> bool:
        for other in self._attempt.early_exits:
            self._exits_seen.setdefault(other.rank, now)
        return any(
            rank not in self._children and now - seen > _SECONDS_AFTER_ANOTHER
            for rank, seen in self._exits_seen.items()
        )


def train_words(run_folder: str | Path, *, replay: bool) -> list[str]:
    """What Python is given to train as one process of a run."""
    return ["-m", "asyncpp_cli", "train", str(run_folder), *(["--replay"] if replay else [])]


def supervise(
    attempt: Attempt,
    ranks: range,
    *,
    size: int,
    first_here: int,
    local_size: int,
    devices: str | None,
) -> bool:
    """Run ranks of an attempt in child processes; returns whether all completed or stopped on request.

    Args:
        attempt: the attempt.
        ranks: ranks of the children.
        size: number of processes of the attempt.
        first_here: lowest rank on this machine.
        local_size: number of processes on this machine.
        devices: GPUs for the attempt's processes on this machine, in CUDA_VISIBLE_DEVICES' notation; None:
            leave the environment as it is.

    Raises:
        TakenOverError: another machine has taken over the run.
    """
    from asyncpp_cli.runs.attempts.attempt import taken_over
    from asyncpp_cli.runs.attempts.settle import end_rank
    from asyncpp_cli.runs.processes import process_id, this_process
    from asyncpp_cli.runs.status import State

    status = attempt.run.status()
    if status.state != State.RUNNING or status.attempt != attempt.number:
        return False  # the attempt was given up meanwhile
    site = attempt.site()
    replay = (claimed := attempt.claimed) is not None and claimed.replay
    command = [sys.executable, *train_words(attempt.run.folder, replay=replay)]
    environment = dict(os.environ) | {
        ATTEMPT_VARIABLE: str(attempt.number),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "OMP_NUM_THREADS": str(site.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    node = os.environ.get("SLURMD_NODENAME", "")
    children: dict[int, subprocess.Popen[bytes]] = {}
    for rank in ranks:
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank - first_here)}
        try:
            with attempt.log_file(rank).open("ab") as log:
                # The child ends when its standard input closes, so it does not outlive its supervisor.
                child = subprocess.Popen(
                    command,
                    env=environment | of_rank,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            attempt.record_start(rank, this_process(), node=node)
            attempt.record_error(rank, error)
            end_rank(attempt, rank, code=1, signal_number=None, stopped=False)
            continue
        children[rank] = child
        attempt.record_start(rank, process_id(child.pid), this_process(), node=node)
    received = early_signals.received  # may still grow
    supervisor = Supervisor(
        attempt, children, size=size, grace=site.grace, lease=site.lease, received=received
    )
    ended_well = supervisor.watch()
    if supervisor.taken_over:
        raise taken_over(attempt)
    return ended_well and len(children) == len(ranks)


def main() -> None:
    """Run the ranks that the command line names, or the one of srun's environment."""
    # First of all: SLURM may signal as soon as the job has started.
    early_signals.listen(signal.SIGTERM, signal.SIGUSR2)

    from asyncpp_cli.base.errors import exit_code_of

    code = exit_code_of(_run)
    # Without interpreter shutdown, during which a signal would be fatal.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run() -> int:
    from asyncpp_cli.base.errors import TakenOverError
    from asyncpp_cli.runs.attempts.attempt import Attempt
    from asyncpp_cli.runs.run_folder import open_run

    attempt = Attempt(open_run(Path(sys.argv[1])), int(sys.argv[2]))
    devices: str | None
    if len(sys.argv) > 3:
        size = local_size = int(sys.argv[3])
        ranks, first_here, devices = range(size), 0, sys.argv[4]
    else:
        rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        ranks, first_here = range(rank, rank + 1), rank - int(os.environ["SLURM_LOCALID"])
        tasks, node = os.environ["SLURM_STEP_TASKS_PER_NODE"], int(os.environ["SLURM_NODEID"])
        local_size = tasks_of_node(tasks, node=node)
        # On GPUs, SLURM sets CUDA_VISIBLE_DEVICES.
        devices = "" if attempt.site().device == "cpu" else None
    try:
        ended_well = supervise(
            attempt,
            ranks,
            size=size,
            first_here=first_here,
            local_size=local_size,
            devices=devices,
        )
    except TakenOverError as error:
        print(error)
        return TAKEN_OVER
    # 0 after saving on request, or srun would kill the ranks that still save.
    return 0 if ended_well else 1


def tasks_of_node(counts: str, *, node: int) -> int:
    """Number of tasks on a node, from SLURM's list for all nodes: `2(x3),1`."""
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            break
        nodes = int(match[2] or 1)
        if node < nodes:
            return int(match[1])
        node -= nodes
    raise ValueError(f"SLURM's {counts!r} does not say how many tasks node {node} has")


if __name__ == "__main__":
    main()
