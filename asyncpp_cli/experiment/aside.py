"""Puts runs aside while their experiment is changed: they are removed at the end, or put back if it fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from asyncpp_cli.errors import UserError
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue


@contextmanager
def set_aside(
    experiment: Experiment, runs: Sequence[Run], *, check: Callable[[RunStatus], None]
) -> Iterator[None]:
    """Put runs aside; the experiment must be locked.

    Args:
        experiment: the runs' experiment, as its file is before the change.
        runs: runs of it.
        check: called with the status of each, under the lock that a launch claims a run with; raises if it
            must stay.

    Raises:
        UserError: a run's folder is a link, or what `check` raises; all runs are back then.
    """
    moved = []
    for run in runs:
        check_inside(experiment, run)
    try:
        for run in runs:
            if run.folder.is_dir():
                with run.locked():
                    check(SlurmQueue(experiment).run_status(run, with_accounting=False))
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


def check_idle(run_status: RunStatus) -> None:
    """Check that a run is neither running nor queued.

    Raises:
        UserError: it is, or may be.
    """
    run = run_status.run.id
    if run_status.status.state == State.RUNNING or run_status.has_job:
        state = "running" if run_status.status.state == State.RUNNING else "queued"
        raise UserError(f"{run} is {state}: `asyncpp cancel` it first; nothing was removed")
    if not run_status.queue_known and run_status.status.state != State.COMPLETED:
        raise UserError(f"{run} may be queued: SLURM does not answer; nothing was removed")


def check_pending(run_status: RunStatus) -> None:
    """Check that a run has not begun and is not queued.

    Raises:
        UserError: it has, or is.
    """
    status = run_status.status
    if status.state != State.PENDING or status.attempt:
        raise UserError(
            f"{run_status.run.id} is {status.state}: --replace replaces runs that have not begun; nothing "
            "was changed (`asyncpp remove` removes any run)"
        )
    check_idle(run_status)


def check_inside(experiment: Experiment, run: Run) -> None:
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
