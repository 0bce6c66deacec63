"""Repairing a damaged run: its status is rebuilt from its attempts; its metrics go back to a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.base.atomic_files import write_bytes
from asyncpp_cli.base.console import command
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.end_row import has_rows, metrics_problem
from asyncpp_cli.runs.attempts.files import Claimed, RankEnd, RankStart
from asyncpp_cli.runs.attempts.outcome import outcome_of
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import whole_template
from asyncpp_cli.runs.processes import is_gone, is_local
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status
from stages.checkpoint.files import CheckpointError, folder_of, rows_before
from stages.config.run_config import SiteConfig

_REASON = "its files were damaged and have been repaired; it resumes from"


def repair_run(run: Run) -> str:
    """Replace the status of a damaged run, and its metrics if they are damaged; does nothing to other runs.
    What was there is kept beside it.

    Returns:
        What was done, for people; empty if nothing was.

    Raises:
        UserError: the folder is gone, the configuration is damaged, or the run may still be running.
    """
    if current_status(run).state != State.DAMAGED:
        return ""
    if not run.folder.is_dir():
        raise UserError(f"{run.folder} is gone; to make the run anew: {restoring(run)}")
    try:
        steps = run.config().train.steps
    except DamagedError as error:
        raise UserError(f"{run.id} cannot be repaired: {error}; to restore it: {restoring(run)}") from error
    with run.locked():
        attempt = Attempt(run, _last_attempt(run))
        if (why := _may_be_running(attempt)) is not None:
            raise UserError(f"{run.id} cannot be repaired: {why}")
        _set_aside(run.status_file)
        now = time.time()
        status = Status(
            state=State.INTERRUPTED,
            cause=Cause.ERROR,
            attempt=attempt.number,
            step=next((step for step in run.saved_steps if has_rows(run, step)), 0),
            steps=steps,
            started=now,
            updated=now,
            ended=now,
        )
        claimed = attempt.read(Claimed)
        if claimed is not None:
            state, cause, reason = outcome_of(attempt, attempt.ends(claimed.processes), steps=steps)
            step = steps if state == State.COMPLETED else status.step
            if state in (State.COMPLETED, State.PAUSED):
                ended = replace(status, state=state, cause=cause, reason=reason, step=step)
                if not metrics_problem(run, ended):
                    run.write_status(ended)
                    return f"{run.id} is repaired: it is {state}"
        if metrics_problem(run, status):
            status = replace(status, step=_go_back(run))
        status = replace(status, reason=f"{_REASON} step {status.step}")
        run.write_status(status)
        return f"{run.id} is repaired: it resumes from step {status.step}"


def damage(run: Run, status: Status) -> str:
    """What is wrong with a run that cannot be read, and the command that repairs it if it is damaged."""
    if status.state == State.UNREADABLE:
        return status.reason
    if not run.folder.is_dir():
        return f"{status.reason}; to make the run anew: {restoring(run)}"
    return f"{status.reason}; to repair it: {command('launch', run.folder.parents[1] / run.id)}"


def restoring(run: Run) -> str:
    """The command that makes a run's folder or configuration anew where it is missing or damaged."""
    folder = run.folder.parents[1]
    return command("sweep", whole_template(folder), "--out", folder)


def _go_back(run: Run) -> int:
    """Cut the metrics to the rows before the newest checkpoint whose rows are there; returns its step.

    Without any, metrics and checkpoints are set aside, and the run starts again.

    Raises:
        UserError: it cannot start again, because it continues another.
    """
    content = run.metrics_file.read_bytes() if run.metrics_file.is_file() else b""
    for step in run.saved_steps:
        with contextlib.suppress(CheckpointError):
            rows = rows_before(folder_of(run.checkpoints, step), run=run.id)
            if rows is not None and hashlib.sha256(content[: rows.bytes]).hexdigest() == rows.sha256:
                _set_aside(run.metrics_file)
                write_bytes(run.metrics_file, content[: rows.bytes], sync=True)
                return step
    if run.lineage() is not None:
        raise UserError(f"{run.id} cannot be repaired: it continues another run, and its metrics are lost")
    _set_aside(run.metrics_file)
    _set_aside(run.checkpoints)
    return 0


def _set_aside(path: Path) -> None:
    """Rename a damaged file or folder, if it is there, to a name that is not in use."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    if path.exists():
        path.replace(next(name for name in names if not name.exists()))


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
