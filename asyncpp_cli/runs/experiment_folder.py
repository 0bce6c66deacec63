"""The experiment folder: experiment.json and the paths of everything beside the runs.

EXPERIMENT/experiment.json         name, template, cells {id, axes}
EXPERIMENT/template.yaml           the user's own template
EXPERIMENT/resolved.yaml           the same with its `base` and changes of the command line
EXPERIMENT/lock                    held while the three above are written (`experiment.render`)
EXPERIMENT/submissions/            what was submitted to SLURM (`slurm.submissions`)
EXPERIMENT/tune.json               what is tuned (`tune.plan`)
EXPERIMENT/cancelled.jsonl         every `asyncpp cancel` (`launch.cancel`)
EXPERIMENT/code/                   snapshots of the code that jobs run (`launch.submission.snapshot`)
EXPERIMENT/runs/ID/                one folder per run (`runs.run_folder`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.base.console import command
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.runs.run_folder import Inside, Run, RunId
from stages.config.records import FileRecord, Record, read_bytes, read_record

EXPERIMENT_FILE = "experiment.json"


class Cell(Record, frozen=True, kw_only=True):
    """A cell of the matrix: the run's id and its coordinates.

    `axes` always has `schedule, optimizer, error_feedback` (the coefficient), `model` and `seed`, followed by
    further axes under their dotted configuration keys.
    """

    id: RunId
    axes: dict[str, str | int | float | bool | None]
    config_sha256: str = ""
    """SHA-256 of config.yaml's bytes as it was written; empty if unknown."""
    loss_of: RunId | None = None
    """The run whose loss is this one's, too, if it trains for its speed alone (`experiment.speed_runs`)."""


class _Description(FileRecord, frozen=True, kw_only=True):
    """The content of experiment.json; see `Experiment`."""

    name: str
    template: str
    cells: tuple[Cell, ...]
    allowed_code: tuple[str, ...] = ()


_DESCRIBED = ("name", "template", "cells", "allowed_code")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment's folder and the content of its experiment.json."""

    folder: Path
    name: str
    template: str
    """The template's name or file, as given to `sweep`."""
    cells: tuple[Cell, ...]
    allowed_code: tuple[str, ...] = ()
    """Code of the user's own that the cells name, `module:name`: confirmed when they were made."""

    own_template = Inside("template.yaml")
    resolved_template = Inside("resolved.yaml")
    submissions = Inside("submissions")
    code = Inside("code")
    """Folder of the code snapshots that jobs run."""

    def run(self, cell_id: str) -> Run:
        return Run(self.folder / "runs" / cell_id)

    @property
    def runs(self) -> list[Run]:
        """The run of each cell, in the order of the cells."""
        return [self.run(cell.id) for cell in self.cells]

    @property
    def runs_to_launch(self) -> list[Run]:
        """The runs, all arms of the first seed before those of the next.

        So arms are trained one soon after the other, under the same conditions of the machine, and can be
        compared before the last seed is done.
        """
        by_seed: dict[str, list[Run]] = {}
        for cell in self.cells:
            by_seed.setdefault(repr(cell.axes.get("seed")), []).append(self.run(cell.id))
        return [run for runs in by_seed.values() for run in runs]


def whole_template(folder: Path) -> Path:
    """The template that makes all cells of an experiment anew.

    Folders of earlier versions have it as template.yaml.
    """
    resolved = folder / "resolved.yaml"
    return resolved if resolved.is_file() else folder / "template.yaml"


def open_experiment(folder: Path) -> Experiment:
    """The experiment in a folder.

    Raises:
        UserError: there is none, or experiment.json cannot be read.
    """
    file = folder / EXPERIMENT_FILE
    try:
        read = read_record(file, _Description)
    except FileNotFoundError:
        lacks = f"is not an experiment: it has no {EXPERIMENT_FILE}" if folder.exists() else "does not exist"
        raise UserError(
            f"{folder} {lacks}; accepted: the folder of an experiment that asyncpp sweep made"
        ) from None
    except DamagedError as error:
        raise UserError(str(error)) from error
    seen: set[str] = set()
    for index, cell in enumerate(read.cells):
        if cell.id in seen:
            raise UserError(f"{file}: cells[{index}].id is {cell.id}, which is an earlier cell's")
        seen.add(cell.id)
    return Experiment(folder=folder, **{name: getattr(read, name) for name in _DESCRIBED})


def write_experiment(experiment: Experiment) -> None:
    """Write experiment.json, with the hashes of the configurations as they are."""
    cells = tuple(_with_hash(cell, experiment.run(cell.id)) for cell in experiment.cells)
    described = {name: getattr(experiment, name) for name in _DESCRIBED} | {"cells": cells}
    write_record(experiment.folder / EXPERIMENT_FILE, _Description(**described))


def _with_hash(cell: Cell, run: Run) -> Cell:
    if cell.config_sha256 or not run.config_file.is_file():
        return cell
    return structs.replace(cell, config_sha256=hashlib.sha256(read_bytes(run.config_file)).hexdigest())


def config_problem(experiment: Experiment, cell: Cell) -> DamagedError | None:
    """What is wrong with the configuration of a cell's run; None if it is the run's.

    Quick: it is parsed only where it is not as it was written.
    """
    run = experiment.run(cell.id)
    try:
        content = read_bytes(run.config_file)
        if hashlib.sha256(content).hexdigest() != cell.config_sha256:
            run.config()
    except FileNotFoundError as error:
        return DamagedError(f"{run.config_file} cannot be read ({error.strerror})")
    except DamagedError as error:
        return error
    return None


def runs_at(path: Path) -> tuple[Experiment, tuple[Cell, ...]]:
    """The experiment that a path lies in, and the cells that it names.

    Args:
        path: folder of an experiment (all its cells) or of a run, or EXPERIMENT/PREFIX of ids.

    Raises:
        UserError: it names none of these.
    """
    folder, name = _located(path)
    if not (folder / EXPERIMENT_FILE).exists():
        raise UserError(
            f"{path}: no such experiment or run; accepted: an experiment's folder DIR, DIR/PREFIX for its "
            "runs whose ids begin so, or a run's folder"
        )
    experiment = open_experiment(folder)
    named = _named(experiment, name) if name else experiment.cells
    if name and not named:
        raise UserError(f"{path}: no run of {folder} has an id that begins with {name}")
    return experiment, named


def _named(experiment: Experiment, name: str) -> tuple[Cell, ...]:
    """The cell of this id, or else those whose ids begin so; none for an empty name."""
    same = tuple(cell for cell in experiment.cells if cell.id == name)
    return same or tuple(cell for cell in experiment.cells if name and cell.id.startswith(name))


def run_at(path: Path) -> Run:
    """The run that a path names: DIR/PREFIX of its id, or its folder, also outside of an experiment.

    Raises:
        UserError: it names none, or several.
    """
    if (run := Run(path)).config_file.is_file():
        return run
    experiment, cells = runs_at(path)
    if len(cells) > 1:
        raise UserError(f"{path} names {len(cells)} runs; accepted: one run, DIR/PREFIX of its id")
    return experiment.run(cells[0].id)


def run_is_named(text: str) -> bool:
    """Whether a text that may be a template names a run instead: DIR/PREFIX or its folder."""
    path = Path(text)
    return path.is_dir() or (not path.exists() and _located(path)[1] != "")


def runs_named(path: Path, further: Sequence[str] | None) -> tuple[Experiment, list[Run]]:
    """The experiment and the runs that a command line names; no runs if it names the experiment alone.

    Args:
        path: folder of the experiment, or DIR/PREFIX of a run.
        further: more runs, see `select_runs`.

    Raises:
        UserError: there is no such experiment, or a name matches no run, or several.
    """
    folder, name = _located(path)
    names = [*([name] if name else []), *(further or ())]
    experiment = open_experiment(folder)
    runs = select_runs(experiment, names) if names else []
    return experiment, list({run.id: run for run in runs}.values())


def _located(path: Path) -> tuple[Path, str]:
    """The folder of the experiment that a path names or lies in, and the beginning of ids that it names; the
    path itself and no ids where there is no experiment."""
    folder = _folder_of_runs(path)
    if not (path / EXPERIMENT_FILE).exists() and (folder / EXPERIMENT_FILE).exists():
        return folder, path.name
    return path, ""


def _folder_of_runs(path: Path) -> Path:
    """The folder of the experiment that DIR/PREFIX or DIR/runs/ID would be in."""
    return path.parent.parent if path.parent.name == "runs" else path.parent


def select_runs(experiment: Experiment, names: Sequence[str]) -> list[Run]:
    """Runs by id, unique prefix of an id, or DIR/PREFIX; all runs if `names` is empty.

    Raises:
        UserError: a name matches no run, or several.
    """
    if not names:
        return experiment.runs
    selected = []
    for name in names:
        matches = _named(experiment, _within(experiment, name))
        if len(matches) != 1:
            problem = f"{len(matches)} runs begin with it" if matches else "no such run"
            accepted = f"an id that {command('status', experiment.folder)} shows, or a unique prefix"
            raise UserError(f"{name}: {problem}; accepted: {accepted}")
        selected.append(experiment.run(matches[0].id))
    return selected


def _within(experiment: Experiment, name: str) -> str:
    """The part of a run's name after the experiment's folder.

    Raises:
        UserError: it names a run of another experiment.
    """
    path = Path(name)
    if len(path.parts) < 2:
        return name
    if _folder_of_runs(path).resolve() != experiment.folder.resolve():
        raise UserError(f"{name} is not a run of {experiment.folder}; a command takes runs of one experiment")
    return path.name
