"""Removing runs from an experiment: what would be lost, and the removal itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncpp_cli.errors import UserError
from asyncpp_cli.experiment.aside import check_idle, check_inside, set_aside
from asyncpp_cli.experiment.render import experiment_locked
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment, write_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What is lost with a run."""

    run: Run
    state: str
    step: int
    steps: int
    files: int
    size: int
    """Bytes."""
    checkpoints: int

    @property
    def text(self) -> str:
        """On one line, for people."""
        trained = f"{self.step} of {self.steps} steps" if self.steps else "no steps"
        kept = f"{self.files} files, {self.size / 1e6:,.1f} MB"
        parts = [self.state, trained, kept]
        parts += [f"{self.checkpoints} checkpoints"] if self.checkpoints else []
        return f"{self.run.folder}: {', '.join(parts)}"


def losses(experiment: Experiment, runs: Sequence[Run]) -> list[Loss]:
    """What would be lost with these runs. Writes nothing, but for the end of runs whose processes vanished.

    Raises:
        UserError: a run is running or may be queued, or is elsewhere, or no run would be left.
    """
    ids = {run.id for run in runs}
    for run in runs:
        check_inside(experiment, run)
    _check_some_left(experiment, ids)
    chosen = [
        each for each in SlurmQueue(experiment).run_statuses(with_accounting=False) if each.run.id in ids
    ]
    for each in chosen:
        check_idle(each)
    return [_loss(each) for each in chosen]


def remove_runs(experiment: Experiment, runs: Sequence[Run]) -> None:
    """Remove runs and their cells. `asyncpp sweep` with the experiment's template adds the cells again.

    Raises:
        UserError: as `losses`; nothing is removed then.
    """
    ids = {run.id for run in runs}
    with experiment_locked(experiment.folder):
        experiment = open_experiment(experiment.folder)
        _check_some_left(experiment, ids)
        left = tuple(cell for cell in experiment.cells if cell.id not in ids)
        with set_aside(experiment, runs, check=check_idle):
            write_experiment(replace(experiment, cells=left))


def _check_some_left(experiment: Experiment, ids: set[str]) -> None:
    if ids >= {cell.id for cell in experiment.cells}:
        raise UserError(f"{experiment.folder} has no other runs; to remove all of it, remove the folder")


def _loss(run_status: RunStatus) -> Loss:
    run, status = run_status.run, run_status.status
    files = [file for file in run.folder.rglob("*") if file.is_file() and not file.is_symlink()]
    checkpoints = list(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else []
    return Loss(
        run=run,
        state=str(status.state),
        step=status.step,
        steps=status.steps,
        files=len(files),
        size=sum(file.stat().st_size for file in files),
        checkpoints=len(checkpoints),
    )
