"""The rank and attempt of this process: from a supervisor, from torchrun, or as the only process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from asyncpp_cli.atomic_files import write_record
from asyncpp_cli.errors import UserError
from asyncpp_cli.launch.supervisor import ATTEMPT_VARIABLE
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import check_current, claim
from asyncpp_cli.runs.attempts.settle import end_rank
from asyncpp_cli.runs.processes import ProcessId, is_gone, is_local, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Time
from asyncpp_cli.sites.resources import this_machine
from stages.config import RunConfig
from stages.liveness.stop_signal import RESUMABLE
from stages.records import Count, FileRecord, read_record

_JOIN_TIMEOUT = 60.0
_MAX_AGE = 600.0
"""Seconds after which a meeting file of rank 0 on another machine is taken to be from an earlier start."""


@dataclass(frozen=True)
class RankEnv:
    """This process's rank, from its environment variables."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes on this machine."""
    local_size: int
    """Number of processes on this machine."""
    supervised: bool


def read_rank_env() -> RankEnv:
    """The rank that a supervisor or torchrun set in the environment; rank 0 of 1 without them."""
    environment = os.environ
    return RankEnv(
        rank=int(environment.get("RANK", "0")),
        size=int(environment.get("WORLD_SIZE", "1")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        supervised=ATTEMPT_VARIABLE in environment,
    )


@contextmanager
def attempt_of_rank(run: Run, rank_env: RankEnv, *, replay: bool, config: RunConfig) -> Iterator[Attempt]:
    """Take part in an attempt as a rank while the block runs, and record the rank's end.

    Args:
        run: the run.
        rank_env: this process's rank.
        replay: whether all ranks take turns in this process.
        config: configuration of the run.

    Raises:
        UserError: the run is completed, or running elsewhere.
    """
    if rank_env.supervised:
        _end_with_supervisor()
        attempt = Attempt(run, int(os.environ[ATTEMPT_VARIABLE]))
        with _recording_errors(attempt, rank_env.rank):
            check_current(attempt)
            yield attempt
        return
    attempt = _begin(run, rank_env, replay=replay, config=config)
    attempt.record_start(rank_env.rank, this_process())
    # As an exception, so that the `finally` below records the end.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    code, stopped = 1, False
    try:
        with _recording_errors(attempt, rank_env.rank):
            check_current(attempt)
            yield attempt
        code = 0
    except KeyboardInterrupt:
        attempt.stop("ended by Ctrl-C")
        raise
    except SystemExit as leaving:
        stopped = True
        code = RESUMABLE if leaving.code == RESUMABLE else 1
        raise
    finally:
        end_rank(attempt, rank_env.rank, code=code, signal_number=None, stopped=stopped)


@contextmanager
def _recording_errors(attempt: Attempt, rank: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        attempt.record_error(rank, error)
        raise


def _end_with_supervisor() -> None:
    """End this process when its supervisor ends, which closes this process's standard input."""

    def wait() -> None:
        # Not sys.stdin, whose lock would be held here during interpreter shutdown.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _begin(run: Run, rank_env: RankEnv, *, replay: bool, config: RunConfig) -> Attempt:
    """Claim an attempt as rank 0, or join the one that rank 0 has claimed."""
    if rank_env.rank != 0:
        return _join(run)
    gpus_here = 0 if config.site.device == "cpu" else min(rank_env.local_size, len(this_machine().gpus))
    attempt = claim(
        run,
        processes=rank_env.size,
        replay=replay,
        steps=config.train.steps,
        gpus=gpus_here * (rank_env.size // rank_env.local_size),
        threads=config.site.threads,
    )
    if attempt is None:
        status = run.status()
        if status.state == State.COMPLETED:
            raise UserError(f"{run.folder} is completed: nothing is left to train")
        raise UserError(f"{run.folder} is being run on {status.host} (attempt {status.attempt})")
    if rank_env.size > 1:
        meeting = _Meeting(attempt=attempt.number, time=time.time(), rank_0=this_process())
        write_record(_meeting_file(run), meeting)
    return attempt


class _Meeting(FileRecord, frozen=True, kw_only=True):
    """The attempt that rank 0 of a torchrun has claimed."""

    attempt: Count
    time: Time
    rank_0: ProcessId


def _join(run: Run) -> Attempt:
    deadline = time.monotonic() + _JOIN_TIMEOUT
    while time.monotonic() < deadline:
        try:
            meeting = read_record(_meeting_file(run), _Meeting)
        except FileNotFoundError:
            meeting = None
        # The file may be from an earlier start with the same address: then its rank 0 is gone, or it is old.
        if meeting is not None:
            here, age = is_local(meeting.rank_0), time.time() - meeting.time
            if not is_gone(meeting.rank_0) if here else age < _MAX_AGE:
                return Attempt(run, meeting.attempt)
        time.sleep(0.05)
    raise UserError(f"rank 0 did not begin the run {run.folder} within {_JOIN_TIMEOUT:g} s")


def _meeting_file(run: Run) -> Path:
    """File by which rank 0 shares the attempt with the other ranks of the same torchrun."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    address = "\n".join(os.environ.get(name, "") for name in names)
    run.attempts.mkdir(exist_ok=True)
    return run.attempts / f"meeting-{sha256(address.encode()).hexdigest()[:16]}.json"
