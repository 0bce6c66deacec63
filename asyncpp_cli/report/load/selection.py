"""Loads the runs that a path names: an experiment, a run, or a cell by the beginning of its runs' ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncpp_cli.errors import UserError
from asyncpp_cli.report.load.experiments import Loader
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.runs.experiment_folder import EXPERIMENT_FILE, Experiment, open_experiment


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Loaded runs of one experiment."""

    name: str
    """The path that names them."""
    runs: Sequence[RunResult]


def load_selection(path: Path) -> Selection:
    """The runs that a path names.

    Args:
        path: folder of an experiment, of a run, or EXPERIMENT/BEGINNING: all its runs whose ids begin so.

    Raises:
        UserError: it names none of these.
    """
    experiment = _selected(path)
    runs, _ = Loader(keep_steps=False).load([experiment])
    return Selection(name=str(path), runs=runs)


def _selected(path: Path) -> Experiment:
    """The experiment that the path lies in, with those of its cells that the path names."""
    if (path / EXPERIMENT_FILE).exists():
        return open_experiment(path)
    folder = path.parent.parent if path.parent.name == "runs" else path.parent
    if not (folder / EXPERIMENT_FILE).exists():
        raise UserError(
            f"{path}: no such experiment or run; accepted: an experiment's folder DIR, a run's folder "
            "DIR/runs/ID, or DIR/BEGINNING for all its runs whose ids begin so"
        )
    experiment = open_experiment(folder)
    named = [cell for cell in experiment.cells if cell.id == path.name] or [
        cell for cell in experiment.cells if cell.id.startswith(path.name)
    ]
    if not named:
        raise UserError(f"{path}: no run of {folder} has an id that begins with {path.name}")
    return replace(experiment, cells=tuple(named))
