"""Removing runs from an experiment: what would be lost, and the removal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from asyncpp_cli.base.console import command
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.render import experiment_locked
from asyncpp_cli.runs.attempts.attempt import Attempt, last_sign
from asyncpp_cli.runs.attempts.files import Claimed
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment, write_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue

_ACCOUNTING_SECONDS = 10.0
"""Time within which SLURM's accounting knows that a job has ended."""


@dataclass(frozen=True, kw_only=True)
class RunToRemove:
    """A run, and what is lost with it."""

    run: Run
    status: Status
    files: int
    size: int
    """Bytes."""
    checkpoints: int

    @property
    def text(self) -> str:
        """On one line, for people."""
        status = self.status
        trained = f"{status.step} of {status.steps} steps" if status.steps else "no steps"
        kept = f"{self.files} files, {self.size / 1e6:,.1f} MB"
        parts = [str(status.state), trained, kept]
        parts += [f"{self.checkpoints} checkpoints"] if self.checkpoints else []
        return f"{self.run.folder}: {', '.join(parts)}"


def checked(experiment: Experiment, runs: Sequence[Run]) -> list[RunToRemove]:
    """These runs with what would be lost, checked to be neither running nor queued.

    Writes nothing, but for the end of runs whose processes vanished.

    Raises:
        UserError: a run is running or may be queued, or is elsewhere, or no run would be left.
    """
    ids = {run.id for run in runs}
    for run in runs:
        _check_inside(experiment, run)
    _check_some_left(experiment, ids)
    deadline = time.monotonic() + _ACCOUNTING_SECONDS
    while True:
        statuses = SlurmQueue(experiment).run_statuses(with_accounting=True)
        chosen = [each for each in statuses if each.run.id in ids]
        for each in chosen:
            _check_idle(each)
        going_on = [each for each in chosen if each.is_accounted_live]
        if not going_on:
            return [_to_remove(each) for each in chosen]
        if time.monotonic() > deadline:
            job = f"its job {going_on[0].job_id} as {going_on[0].job_state}"
            raise UserError(
                f"{going_on[0].run.id}: sacct has {job}, though squeue does not list it: nothing was "
                "removed; if it has ended: sacctmgr show runawayjobs"
            )
        time.sleep(1)


def remove_runs(experiment: Experiment, runs: Sequence[Run]) -> None:
    """Remove runs and their cells. `asyncpp sweep` with the experiment's template adds the cells again.

    Raises:
        UserError: as `checked`; nothing is removed then.
    """
    ids = {run.id for run in runs}
    with experiment_locked(experiment.folder):
        experiment = open_experiment(experiment.folder)
        _check_some_left(experiment, ids)
        left = tuple(cell for cell in experiment.cells if cell.id not in ids)
        with _set_aside(experiment, runs):
            write_experiment(replace(experiment, cells=left))


def _check_some_left(experiment: Experiment, ids: set[str]) -> None:
    if ids >= {cell.id for cell in experiment.cells}:
        raise UserError(f"{experiment.folder} has no other runs; to remove all of it, remove the folder")


def _to_remove(run_status: RunStatus) -> RunToRemove:
    run = run_status.run
    files = [file for file in run.folder.rglob("*") if file.is_file() and not file.is_symlink()]
    checkpoints = list(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else []
    return RunToRemove(
        run=run,
        status=run_status.status,
        files=len(files),
        size=sum(file.stat().st_size for file in files),
        checkpoints=len(checkpoints),
    )


@contextmanager
def _set_aside(experiment: Experiment, runs: Sequence[Run]) -> Iterator[None]:
    """Put runs aside; the experiment must be locked. They are removed at the end, or put back if it fails.

    Raises:
        UserError: a run's folder is a link, or it is running or queued.
    """
    moved = []
    for run in runs:
        _check_inside(experiment, run)
    try:
        for run in runs:
            if run.folder.is_dir():
                with run.locked():
                    # Under the lock that a launch claims a run with.
                    _check_idle(SlurmQueue(experiment).run_status(run, with_accounting=False))
                    aside = run.folder.with_name(f".removed-{run.id}")
                    run.folder.rename(aside)
                    moved.append((run.folder, aside))
        yield
    except BaseException:
        for folder, aside in moved:
            aside.rename(folder)
        raise
    for _, aside in moved:
        shutil.rmtree(aside)


def _check_idle(run_status: RunStatus) -> None:
    """Check that a run is neither running nor queued, by SLURM and by what its processes write.

    Raises:
        UserError: it is, or may be.
    """
    run = run_status.run.id
    if run_status.is_live:
        cancel = command("cancel", run_status.run.folder.parents[1] / run)
        state = "running" if run_status.status.state == State.RUNNING else "queued"
        raise UserError(f"{run} is {state}: {cancel} comes first; nothing was removed")
    attempt = Attempt(run_status.run, run_status.status.attempt)
    claimed = attempt.read(Claimed)
    sign = None if claimed is None else last_sign(attempt)
    if claimed is not None and sign is not None and sign < claimed.lease:
        raise UserError(
            f"{run}: a process of it wrote {sign:.0f} s ago, though it counts as {run_status.status.state}: "
            f"nothing was removed; try again when it has been silent for {claimed.lease:g} s"
        )
    if not run_status.queue_known and run_status.status.state != State.COMPLETED:
        raise UserError(f"{run} may be queued: SLURM does not answer; nothing was removed")


def _check_inside(experiment: Experiment, run: Run) -> None:
    """Check that a run's files are in the experiment's folder: what a link leads to is never removed.

    Raises:
        UserError: they are not.
    """
    inside = experiment.folder.resolve() / "runs" / run.id
    if run.folder.resolve() != inside:
        raise UserError(
            f"{run.folder} is a link, or lies below one, to {run.folder.resolve()}: nothing was removed; "
            "remove the link yourself, then the run"
        )
