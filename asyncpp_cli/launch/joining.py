"""A rank's part in an attempt: claimed by its supervisor, by itself, or by ranks that meet.

Ranks that have no supervisor meet in the run's folder, whoever started them:

RUN/attempts/joining/call.json          rank 0 asks all ranks to answer a random word; later names the attempt
RUN/attempts/joining/WORD/rank-N.json   the answer of rank N

A file of an earlier start has another word, so neither clocks nor names of jobs are compared. The address and
the secret of rank 0 follow in the attempt's folder, as for every attempt (`stages.comm.process.connected`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.base.errors import FAILED, DamagedError, UserError
from asyncpp_cli.base.version import asyncpp_version
from asyncpp_cli.launch.common.rank_env import RankEnv
from asyncpp_cli.launch.common.supervisor import ATTEMPT_VARIABLE
from asyncpp_cli.runs.attempts.attempt import RENEWALS, Attempt, is_superseded, renew, renewed_at, taken_over
from asyncpp_cli.runs.attempts.claims import check_current, claim
from asyncpp_cli.runs.attempts.files import Claimed, RankEnd, RankStart
from asyncpp_cli.runs.attempts.settle import current_status, end_rank
from asyncpp_cli.runs.processes import ProcessId, is_gone, is_local, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.resources import this_machine
from stages.config.records import Count, FileRecord, encoded, read_record
from stages.config.run_config import RunConfig
from stages.config.torch_process import leave
from stages.liveness.stop_signal import RESUMABLE

_Kind = TypeVar("_Kind", bound=FileRecord)
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
        attempt, rank_env = _meet(run, rank_env, config=config)
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
    """Claim the next attempt; waits for one that is ending already, and for a lease that nobody renews."""
    deadline = time.monotonic() + config.site.start_timeout
    renewals: tuple[int, dict[int, float]] | None = None
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
        before, renewals = renewals, (running.number, renewed_at(running))
        is_run = _is_run_here(running) or (before is not None and before != renewals)
        ends = bool(running.early_exits or running.stop_reason)
        if (is_run and not ends) or time.monotonic() > deadline:
            raise UserError(f"{run.folder} is being run on {status.host} (attempt {status.attempt})")
        time.sleep(_POLL_SECONDS)


def _completed(run: Run) -> CompletedError:
    return CompletedError(f"{run.folder} is completed: nothing is left to train")


def _is_run_here(attempt: Attempt) -> bool:
    """Whether a rank's process is alive on this machine, or the one that is to start them."""
    claimed = attempt.read(Claimed)
    processes = [process for rank in attempt.ranks_with(RankStart) for process in attempt.processes(rank)]
    if claimed is not None:
        processes.append(claimed.by)
    return any(is_local(process) and not is_gone(process) for process in processes)


class _Call(FileRecord, frozen=True, kw_only=True):
    """Rank 0's question to all ranks, and later its answer."""

    word: str
    """Random; the name of the folder of answers."""
    settings: str
    """See `_settings`."""
    by: ProcessId
    attempt: Count | None = None
    """The attempt that all have joined; None: ranks are missing."""
    machines: tuple[str, ...] = ()
    """The machine of each rank, once all have joined."""
    refused: str = ""
    """Why there is no attempt."""


class _Answer(FileRecord, frozen=True, kw_only=True):
    """A rank's answer."""

    settings: str
    machine: str
    """See `_machine`."""
    process: ProcessId


def _meet(run: Run, rank_env: RankEnv, *, config: RunConfig) -> tuple[Attempt, RankEnv]:
    """Meet all ranks in the run's folder; returns the attempt and this process's place on its machine.

    Raises:
        CompletedError: the run is completed.
        UserError: a rank is missing or there twice, has other settings, or the run runs elsewhere.
    """
    (run.attempts / "joining").mkdir(parents=True, exist_ok=True)
    _record_vanished(run)
    call = _ask(run, rank_env, config=config) if rank_env.rank == 0 else _reply(run, rank_env, config=config)
    if call.attempt is None:
        raise _completed(run) if run.status().state == State.COMPLETED else UserError(call.refused)
    same = [rank for rank, machine in enumerate(call.machines) if machine == call.machines[rank_env.rank]]
    placed = replace(rank_env, local_rank=same.index(rank_env.rank), local_size=len(same))
    return Attempt(run, call.attempt), placed


def _ask(run: Run, rank_env: RankEnv, *, config: RunConfig) -> _Call:
    """As rank 0: wait for the others, claim an attempt and say so, or why there is none."""
    file, seconds = run.attempts / "joining" / "call.json", config.site.start_timeout
    call = _Call(word=secrets.token_hex(16), settings=_settings(run), by=this_process())
    answers = file.parent / call.word
    answers.mkdir()
    write_record(file, call)
    deadline = time.monotonic() + seconds
    machines = {0: _machine()}
    try:
        while len(machines) < rank_env.size:
            for rank in set(range(1, rank_env.size)) - machines.keys():
                if (answer := _read(answers / f"rank-{rank}.json", _Answer)) is None:
                    continue
                if answer.settings != call.settings:
                    raise UserError(
                        f"rank {rank} on {answer.process.host} has another {run.config_file.name} or "
                        f"another version of asyncpp than rank 0 on {call.by.host}"
                    )
                machines[rank] = answer.machine
            if (other := _read(file, _Call)) is not None and other.word != call.word:
                raise UserError(f"rank 0 of {run.folder} is there twice, also on {other.by.host}")
            if time.monotonic() > deadline:
                missing = ", ".join(map(str, sorted(set(range(rank_env.size)) - machines.keys())[:8]))
                raise UserError(
                    f"{len(machines)} of {rank_env.size} ranks of {run.folder} have come within "
                    f"{seconds:g} s (site.start_timeout), not rank {missing}: start one process per rank, "
                    "all of which see this folder"
                )
            time.sleep(_POLL_SECONDS)
        by_rank = tuple(machines[rank] for rank in range(rank_env.size))
        placed = replace(rank_env, local_size=by_rank.count(by_rank[0]))
        attempt = _claim(run, placed, replay=False, config=config)
        call = structs.replace(call, attempt=attempt.number, machines=by_rank)
    except (UserError, CompletedError) as error:
        call = structs.replace(call, refused=str(error))
    finally:
        shutil.rmtree(answers, ignore_errors=True)
    if (other := _read(file, _Call)) is not None and other.word == call.word:
        write_record(file, call)
    return call


def _reply(run: Run, rank_env: RankEnv, *, config: RunConfig) -> _Call:
    """As another rank: answer rank 0's calls until one of them has an attempt, or is refused."""
    file, seconds = run.attempts / "joining" / "call.json", config.site.start_timeout
    answer = _Answer(settings=_settings(run), machine=_machine(), process=this_process())
    deadline = time.monotonic() + seconds
    word, taken_by = "", None
    while time.monotonic() < deadline:
        call = _read(file, _Call)
        is_open = call is not None and call.attempt is None and not call.refused
        if call is not None and call.word != word and is_open:
            own = file.parent / call.word / f"rank-{rank_env.rank}.json"
            if _write_first(own, answer):
                word, taken_by = call.word, None
                # Rank 0 may wait for the others, and for an earlier attempt to end.
                deadline = time.monotonic() + 2 * seconds
            elif (other := _read(own, _Answer)) is not None:
                # Or both are left over from a start that was killed: then rank 0 will call again.
                word, taken_by = call.word, other.process
        is_answered = call is not None and call.word == word and not is_open
        if taken_by is not None and (is_answered or (is_local(taken_by) and not is_gone(taken_by))):
            raise UserError(
                f"rank {rank_env.rank} of {run.folder} is there twice: here and on {taken_by.host} "
                f"(process {taken_by.pid})"
            )
        if call is not None and is_answered:
            return call
        time.sleep(_POLL_SECONDS)
    status = run.status()
    if status.state == State.RUNNING:
        raise UserError(f"{run.folder} is being run on {status.host} (attempt {status.attempt})")
    raise UserError(
        f"rank 0 did not begin the run {run.folder} within {seconds:g} s (site.start_timeout): "
        "is it started, and does it see this folder?"
    )


def _write_first(file: Path, record: FileRecord) -> bool:
    """Write a file unless it exists or its folder is gone; returns whether it was written."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(encoded(record))
        os.link(temporary, file)
    except (FileExistsError, FileNotFoundError):
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(file: Path, kind: type[_Kind]) -> _Kind | None:
    try:
        return read_record(file, kind)
    except (FileNotFoundError, DamagedError):
        return None


def _settings(run: Run) -> str:
    """Hash of what all ranks must have alike: the run's configuration and the version of asyncpp."""
    return sha256(run.config_file.read_bytes() + asyncpp_version().encode()).hexdigest()


def _machine() -> str:
    """Equal for processes that see each other's processes and share a network."""
    here = this_process()
    try:
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 (it is no path)
    except OSError:
        network = ""
    return "\n".join((here.host, here.boot, here.namespace, network))


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
