"""Experiment folder -> runs as the report sees them; what is wrong with one run's files stays with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncpp_cli import runs
from asyncpp_cli.cluster.attempts import settle
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.report.aggregate import Run
from asyncpp_cli.report.measure import Measurement, measure
from asyncpp_cli.report.predict import predicted_bubble
from asyncpp_cli.settings import items


def load(experiment: runs.Experiment) -> list[Run]:
    """Every run that the experiment lists, in its order."""
    return [_load_run(cell, experiment.run(cell.id)) for cell in experiment.cells]


def _load_run(cell: runs.Cell, run: runs.Run) -> Run:
    if not run.folder.is_dir():
        return Run(id=cell.id, axes=cell.axes, config=None, state="missing", reason=f"{run.folder} is gone")
    config: Mapping[str, Any] | None = None
    try:
        run_config = run.config()
        config = dict(items(run_config))
        status = _status(run)
        rows, torn = run.metrics_and_torn_lines()
        measurement = measure(rows)
    except (DamagedError, OSError) as error:
        return _unreadable(cell, config, str(error))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # Rows are JSON of any shape: a field that is missing or no number shows when it is computed with.
        return _unreadable(cell, config, f"{run.metrics_file} has a row of another form ({error!r})")
    if status.state == runs.State.COMPLETED and measurement.val_loss is None:
        return _unreadable(
            cell, config, f"{run.metrics_file} has no evaluation although the run is completed"
        )
    return Run(
        id=cell.id,
        axes=cell.axes,
        config=config,
        state=str(status.state),
        reason=status.reason or None,
        measurement=measurement,
        bubble_predicted=predicted_bubble(run_config),
        problems=(f"{run.metrics_file}: {torn} line(s) cut off, left out",) if torn else (),
    )


def _status(run: runs.Run) -> runs.Status:
    """The run's status; a run whose processes have vanished without a word is settled first."""
    try:
        return settle(run)
    except OSError:
        # Somebody else's experiment, or a read-only disk: the status is taken as it stands.
        return run.status()


def _unreadable(cell: runs.Cell, config: Mapping[str, Any] | None, reason: str) -> Run:
    return Run(
        id=cell.id,
        axes=cell.axes,
        config=config,
        state="unreadable",
        reason=reason,
        measurement=Measurement(),
    )
