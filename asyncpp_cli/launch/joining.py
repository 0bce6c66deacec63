"""A rank's part in an attempt: claimed by its supervisor, by itself, or by ranks that torchrun has started.

Ranks of torchrun agree on the attempt through torchrun's store (`stages.comm.torchrun`); the address and the
secret of rank 0 follow in the attempt's folder, as for every attempt (`stages.comm.process.connected`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from asyncpp_cli.base.errors import FAILED, UserError
from asyncpp_cli.base.version import asyncpp_version
from asyncpp_cli.launch.common.rank_env import RankEnv
from asyncpp_cli.launch.common.supervisor import ATTEMPT_VARIABLE
from asyncpp_cli.runs.attempts.attempt import RENEWALS, Attempt, is_superseded, renew, renewed_at, taken_over
from asyncpp_cli.runs.attempts.claims import check_current, claim
from asyncpp_cli.runs.attempts.files import Claimed, RankEnd, RankStart
from asyncpp_cli.runs.attempts.settle import current_status, end_rank
from asyncpp_cli.runs.processes import is_gone, is_local, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.resources import this_machine
from stages.config.records import Count, FileRecord, decoded, encoded
from stages.config.run_config import RunConfig
from stages.config.torch_process import importing_torch, leave
from stages.liveness.stop_signal import RESUMABLE

_POLL_SECONDS = 0.1


class CompletedError(Exception):
    """Nothing is left to train: no mistake where a starter starts its processes again."""


@contextmanager
def attempt_of_rank(
    run: Run, rank_env: RankEnv, *, replay: bool, config: RunConfig
) -> Iterator[tuple[Attempt, RankEnv]]:
    """Take part in an attempt as a rank while the block runs, and record the rank's end.

    Yields the attempt, and the rank with its place on its machine.

    Args:
        run: the run.
        rank_env: this process's rank.
        replay: whether all ranks take turns in this process.
        config: configuration of the run.

    Raises:
        CompletedError: the run is completed.
        UserError: the run is running elsewhere, or not all of its ranks have come.
    """
    if rank_env.supervised:
        _end_with_supervisor()
        attempt = Attempt(run, int(os.environ[ATTEMPT_VARIABLE]))
        with _recording_errors(attempt, rank_env.rank):
            check_current(attempt)
            yield attempt, rank_env
        return
    if current_status(run).state == State.COMPLETED:
        raise _completed(run)
    if rank_env.size > 1:
        attempt = _meet(run, rank_env, config=config)
    else:
        attempt = _claim(run, rank_env, replay=replay, config=config)
    attempt.record_start(rank_env.rank, this_process())
    # As an exception, so that the `finally` below records the end.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    code, stopped = 1, False
    try:
        with _recording_errors(attempt, rank_env.rank):
            check_current(attempt)
            with _lease_kept(attempt, rank_env.rank, seconds=attempt.site().lease):
                yield attempt, rank_env
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
def _lease_kept(attempt: Attempt, rank: int, *, seconds: float) -> Iterator[None]:
    """Renew a rank's lease in this block; ends the process if another machine has taken over the run."""
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(seconds / RENEWALS):
            if is_superseded(attempt):
                print(f"asyncpp: {taken_over(attempt)}", file=sys.stderr)
                leave(FAILED)
            renew(attempt, [rank])

    threading.Thread(target=keep, daemon=True, name="lease").start()
    try:
        yield
    finally:
        ended.set()


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


def _claim(run: Run, rank_env: RankEnv, *, replay: bool, config: RunConfig) -> Attempt:
    """Claim the next attempt; waits for one that is ending already, and for a lease that nobody renews.

    Raises:
        CompletedError: the run is completed.
        UserError: the run runs elsewhere.
    """
    deadline = time.monotonic() + config.site.start_timeout
    lease: tuple[int, dict[int, float]] | None = None
    gpus_here = 0 if config.site.device == "cpu" else min(rank_env.local_size, len(this_machine().gpus))
    while True:
        attempt = claim(
            run,
            processes=rank_env.size,
            replay=replay,
            steps=config.train.steps,
            gpus=gpus_here * (rank_env.size // rank_env.local_size),
            threads=config.site.threads,
        )
        if attempt is not None:
            return attempt
        status = run.status()
        if status.state == State.COMPLETED:
            raise _completed(run)
        running = Attempt(run, status.attempt)
        lease_before, lease = lease, (running.number, renewed_at(running))
        is_renewed = lease_before is not None and lease_before != lease
        is_alive = _is_alive_here(running) or is_renewed
        is_ending = bool(running.early_exits or running.stop_reason)
        if (is_alive and not is_ending) or time.monotonic() > deadline:
            raise UserError(f"{run.folder} is being run on {status.host} (attempt {status.attempt})")
        time.sleep(_POLL_SECONDS)


def _completed(run: Run) -> CompletedError:
    return CompletedError(f"{run.folder} is completed: nothing is left to train")


def _is_alive_here(attempt: Attempt) -> bool:
    """Whether a rank's process is alive on this machine, or the one that is to start them."""
    claimed = attempt.read(Claimed)
    processes = [process for rank in attempt.ranks_with(RankStart) for process in attempt.processes(rank)]
    if claimed is not None:
        processes.append(claimed.by)
    return any(is_local(process) and not is_gone(process) for process in processes)


class _Decided(FileRecord, frozen=True, kw_only=True):
    """What rank 0 tells the others."""

    attempt: Count | None = None
    """The attempt that all have joined; None: there is none."""
    refused: str = ""
    """Why there is none."""
    completed: bool = False
    """Whether it is because the run is completed."""


def _meet(run: Run, rank_env: RankEnv, *, config: RunConfig) -> Attempt:
    """Meet all ranks through torchrun's store; returns the attempt that rank 0 has claimed for them.

    Raises:
        CompletedError: the run is completed.
        UserError: a rank is missing, has other settings, or the run runs elsewhere.
    """
    with importing_torch():
        from stages.comm.torchrun import MissingError, agree

    seconds = config.site.start_timeout

    def decide(settings: Sequence[str]) -> str:
        try:
            if other := next((rank for rank, each in enumerate(settings) if each != settings[0]), None):
                raise UserError(
                    f"rank {other} has another {run.config_file.name} or version of asyncpp than rank 0"
                )
            attempt = _claim(run, rank_env, replay=False, config=config)
            return encoded(_Decided(attempt=attempt.number)).decode()
        except (UserError, CompletedError) as error:
            completed = isinstance(error, CompletedError)
            return encoded(_Decided(refused=str(error), completed=completed)).decode()

    _record_vanished(run)
    try:
        text = agree(rank_env.rank, rank_env.size, brought=_settings(run), seconds=seconds, decide=decide)
    except MissingError as error:
        missing = ", ".join(map(str, error.ranks[:8]))
        raise UserError(
            f"rank {missing} of {run.folder} did not come within {seconds:g} s (site.start_timeout): start "
            "one process per rank, all of which see this folder"
        ) from error
    decided = decoded(text.encode(), _Decided, where="what rank 0 decided")
    if decided.attempt is None:
        raise CompletedError(decided.refused) if decided.completed else UserError(decided.refused)
    return Attempt(run, decided.attempt)


def _settings(run: Run) -> str:
    """Hash of what all ranks must have alike: the run's configuration and the version of asyncpp."""
    return sha256(run.config_file.read_bytes() + asyncpp_version().encode()).hexdigest()


def _record_vanished(run: Run) -> None:
    """Record the ends of ranks that were killed on this machine, which rank 0 cannot see from another."""
    status = run.status()
    if status.state != State.RUNNING:
        return
    attempt = Attempt(run, status.attempt)
    for rank in attempt.ranks_with(RankStart) - attempt.ranks_with(RankEnd):
        processes = attempt.processes(rank)
        if processes and all(is_gone(process) for process in processes):
            end_rank(attempt, rank, code=None, signal_number=signal.SIGKILL, stopped=False)
