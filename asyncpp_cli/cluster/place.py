"""Which rank of which attempt this process is: told by a supervisor, by torchrun, or all there is."""

from __future__ import annotations

import json
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

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.claims import claim, enter
from asyncpp_cli.cluster.processes import is_gone, is_here, process_from, this_process
from asyncpp_cli.cluster.supervise import ATTEMPT_VARIABLE
from asyncpp_cli.errors import UserError
from asyncpp_cli.files import write_json
from asyncpp_cli.runs import Run, State
from stages.signals import RESUMABLE

_SECONDS_TO_MEET = 60.0
_NEW_ENOUGH = 600.0


@dataclass(frozen=True)
class Place:
    """This process among those of its run."""

    rank: int
    size: int
    local_rank: int
    """Among those on this machine."""
    local_size: int
    """How many of them are on this machine."""
    supervised: bool


def find_place() -> Place:
    """What the environment says: that of a supervisor or of torchrun, or else that this process is alone."""
    environment = os.environ
    return Place(
        rank=int(environment.get("RANK", "0")),
        size=int(environment.get("WORLD_SIZE", "1")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        supervised=ATTEMPT_VARIABLE in environment,
    )


@contextmanager
def taking_part(run: Run, place: Place, *, replay: bool, steps: int) -> Iterator[Attempt]:
    """This process's attempt, of which it is a rank until the block ends; its end is recorded.

    Args:
        run: which.
        place: of this process.
        replay: whether all ranks take turns in this process.
        steps: of the run.

    Raises:
        UserError: the run is completed, or going on elsewhere.
    """
    if place.supervised:
        _end_with_supervisor()
        attempt = Attempt(run, int(os.environ[ATTEMPT_VARIABLE]))
        with _keeping_errors(attempt, place.rank):
            enter(attempt, place.rank)
            yield attempt
        return
    attempt = _begin(run, place, replay=replay, steps=steps)
    attempt.rank_started(place.rank, this_process())
    # As an exception it passes through the `finally` below, which records the end.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    code, stopped = 1, False
    try:
        with _keeping_errors(attempt, place.rank):
            enter(attempt, place.rank)
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
        attempt.rank_ended(place.rank, code=code, signal_number=None, stopped=stopped)


@contextmanager
def _keeping_errors(attempt: Attempt, rank: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        attempt.rank_erred(rank, error)
        raise


def _end_with_supervisor() -> None:
    """End this process when its supervisor ends, however that ends: then its standard input does."""

    def wait() -> None:
        # Not sys.stdin: its lock, held here while waiting, would be missed when the interpreter ends.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _begin(run: Run, place: Place, *, replay: bool, steps: int) -> Attempt:
    """Claim an attempt, as its one process or as torchrun's rank 0, or join rank 0's."""
    if place.rank != 0:
        return _join(run)
    attempt = claim(run, processes=place.size, replay=replay, steps=steps)
    if attempt is None:
        status = run.status()
        if status.state == State.COMPLETED:
            raise UserError(f"{run.folder} is completed: nothing is left to train")
        raise UserError(f"{run.folder} is being run on {status.host} (attempt {status.attempt})")
    if place.size > 1:
        write_json(
            _meeting_file(run),
            {"attempt": attempt.number, "time": time.time(), "rank_0": vars(this_process())},
        )
    return attempt


def _join(run: Run) -> Attempt:
    deadline = time.monotonic() + _SECONDS_TO_MEET
    while time.monotonic() < deadline:
        try:
            meeting = json.loads(_meeting_file(run).read_text())
        except FileNotFoundError:
            meeting = None
        # An earlier start may have had the same address; its rank 0 is gone, or its file is old.
        if meeting is not None:
            rank_0 = process_from(meeting["rank_0"])
            fresh = not is_gone(rank_0) if is_here(rank_0) else time.time() - meeting["time"] < _NEW_ENOUGH
            if fresh:
                return Attempt(run, meeting["attempt"])
        time.sleep(0.05)
    raise UserError(f"rank 0 did not begin the run {run.folder} within {_SECONDS_TO_MEET:g} s")


def _meeting_file(run: Run) -> Path:
    """The same for all ranks of one torchrun, and for no other one's that runs at the same time."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    address = "\n".join(os.environ.get(name, "") for name in names)
    run.attempts.mkdir(exist_ok=True)
    return run.attempts / f"meeting-{sha256(address.encode()).hexdigest()[:16]}.json"
