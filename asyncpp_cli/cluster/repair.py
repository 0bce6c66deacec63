"""Setting a damaged run right: its status is made anew from its attempts, so that it can go on."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from asyncpp_cli.cluster.attempts import SECONDS_OF_SILENCE, Attempt, locked, look
from asyncpp_cli.cluster.outcome import outcome_of
from asyncpp_cli.cluster.processes import is_gone, is_here
from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.runs import Cause, Run, State, Status

_REASON = "its files were damaged and have been set right; it goes on from its checkpoints"


def set_right(run: Run) -> None:
    """Give a damaged run a status that can be read; the damaged file stays beside it. Others are left alone.

    Raises:
        UserError: its folder is gone, its configuration is damaged, or it may be going on.
    """
    if look(run).state != State.DAMAGED:
        return
    if not run.folder.is_dir():
        raise UserError(f"{run.folder} is gone: `asyncpp sweep` into the same folder makes the run anew")
    try:
        steps = run.config().train.steps
    except DamagedError as error:
        raise UserError(f"{run.id} cannot be set right: {error}") from error
    with locked(run):
        attempt = Attempt(run, _last_attempt(run))
        if (why := _may_go_on(attempt)) is not None:
            raise UserError(f"{run.id} cannot be set right: {why}")
        if run.status_file.exists():
            run.status_file.replace(_beside(run.status_file))
        state, cause, reason = State.INTERRUPTED, Cause.ERROR, _REASON
        description = attempt.read("attempt")
        if description is not None:
            known = outcome_of(attempt, description["processes"], steps=steps)
            if known[0] == State.COMPLETED:
                state, cause, reason = known
        step = steps if state == State.COMPLETED else run.saved_step or 0
        now = time.time()
        run.write_status(
            Status(
                state=state,
                cause=cause,
                reason=reason,
                attempt=attempt.number,
                step=step,
                steps=steps,
                started=now,
                updated=now,
                ended=now,
            )
        )


def _last_attempt(run: Run) -> int:
    """The highest number of an attempt that anything is known of."""
    numbers = [0]
    if run.attempts.is_dir():
        numbers += [int(folder.name) for folder in run.attempts.iterdir() if _is_number(folder.name)]
    if run.logs.is_dir():
        names = [file.name.split("-") for file in run.logs.glob("attempt-*-rank-*.log")]
        numbers += [int(name[1]) for name in names if _is_number(name[1])]
    with contextlib.suppress(DamagedError):
        numbers.append(run.status().attempt)
    return max(numbers)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _may_go_on(attempt: Attempt) -> str | None:
    """Why the attempt's processes may still be there; None if they are not."""
    if not attempt.folder.is_dir():
        return None
    ranks = [file.stem.removeprefix("rank-") for file in attempt.folder.glob("rank-*.json")]
    left = [int(rank) for rank in ranks if _is_number(rank) and attempt.read(f"rank-{rank}.end") is None]
    processes = [process for rank in left for process in attempt.processes(rank)]
    if here := [process for process in processes if is_here(process) and not is_gone(process)]:
        return f"its process {here[0].pid} is still there"
    newest = max(
        (_changed(file) for file in (attempt.run.status_file, attempt.run.metrics_file)), default=0.0
    )
    elsewhere = [process.host for process in processes if not is_here(process)]
    if elsewhere and time.time() - newest < SECONDS_OF_SILENCE:
        return f"it may be going on at {elsewhere[0]}: try again when it has been silent for an hour"
    return None


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _beside(file: Path) -> Path:
    """A name for a damaged file that no other file has."""
    number = 1
    while (other := file.with_name(f"{file.name}.damaged-{number}")).exists():
        number += 1
    return other
