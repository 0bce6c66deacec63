"""Repairing a damaged run: its status is rebuilt from its attempts, so that it can resume."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, RankEnd, RankStart
from asyncpp_cli.runs.attempts.outcome import outcome_of
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.processes import is_gone, is_local
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status
from stages.config.run_config import SiteConfig

_REASON = "its files were damaged and have been repaired; it resumes from its checkpoints"


def repair_run(run: Run) -> None:
    """Replace the status of a damaged run, keeping the damaged file beside it; does nothing to other runs.

    Raises:
        UserError: the folder is gone, the configuration is damaged, or the run may still be running.
    """
    if current_status(run).state != State.DAMAGED:
        return
    if not run.folder.is_dir():
        raise UserError(f"{run.folder} is gone: `asyncpp sweep` into the same folder makes the run anew")
    try:
        steps = run.config().train.steps
    except DamagedError as error:
        raise UserError(f"{run.id} cannot be repaired: {error}") from error
    with run.locked():
        attempt = Attempt(run, _last_attempt(run))
        if (why := _may_be_running(attempt)) is not None:
            raise UserError(f"{run.id} cannot be repaired: {why}")
        if run.status_file.exists():
            run.status_file.replace(_backup_name(run.status_file))
        state, cause, reason = State.INTERRUPTED, Cause.ERROR, _REASON
        claimed = attempt.read(Claimed)
        if claimed is not None:
            outcome = outcome_of(attempt, attempt.ends(claimed.processes), steps=steps)
            if outcome[0] in (State.COMPLETED, State.PAUSED):
                state, cause, reason = outcome
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
    """The highest attempt number among folders, logs and status."""
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


def _may_be_running(attempt: Attempt) -> str | None:
    """Why the attempt may still be running; None if it has ended."""
    if not attempt.folder.is_dir():
        return None
    started, ended = attempt.ranks_with(RankStart), attempt.by_rank(RankEnd)
    open_ranks = sorted(started - ended.keys())
    processes = [process for rank in open_ranks for process in attempt.processes(rank)]
    if alive := [process for process in processes if is_local(process) and not is_gone(process)]:
        return f"its process {alive[0].pid} is still running"
    claimed = attempt.read(Claimed)
    lease = SiteConfig().lease if claimed is None else claimed.lease
    for rank in open_ranks:
        elsewhere = [process.host for process in attempt.processes(rank) if not is_local(process)]
        if elsewhere and attempt.run.age(attempt.file(RankStart, rank)) <= lease:
            return f"it may be running on {elsewhere[0]}: try again when it has been silent for {lease:g} s"
    return None


def _backup_name(file: Path) -> Path:
    """An unused name for a damaged file."""
    number = 1
    while (other := file.with_name(f"{file.name}.damaged-{number}")).exists():
        number += 1
    return other
