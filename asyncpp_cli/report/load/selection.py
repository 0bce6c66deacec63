"""Loads the runs that a path names: an experiment, a run, or a cell by the beginning of its runs' ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncpp_cli.report.load.experiments import Loader
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.runs.experiment_folder import runs_at


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
    experiment, cells = runs_at(path)
    runs, _ = Loader(keep_steps=False).load([replace(experiment, cells=cells)])
    return Selection(name=str(path), runs=runs)
