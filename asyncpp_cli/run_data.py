"""Where a run's data lies now, and what it must be: the same for every attempt, and for every seed of a cell.

EXPERIMENT/data.json   where data lies that is not where its runs' config.yaml says
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.runs import Experiment, Run, open_experiment
from stages.config import DataConfig, RunConfig

FORMAT = 1
LOCATIONS = "data.json"
_LONGEST_ROW = 1 << 20


def config_to_train(run: Run) -> RunConfig:
    """The run's configuration with where its data lies now, and the checksum that it must have.

    A run of asyncpp 0.1 has no checksum in its configuration. It goes by what it, or another seed of its
    cell, has begun to train on.

    Raises:
        DamagedError: a file of the run or of its experiment cannot be read.
    """
    config = run.config()
    recorded = config.data.sha256 or _first_corpus(run) or _of_other_seeds(run, config.data)
    config.data.sha256 = recorded
    experiment = _experiment_of(run)
    if config.data.path is not None and experiment is not None:
        config.data.path = locations(experiment).get(config.data.path, config.data.path)
    return config


def locations(experiment: Path) -> dict[str, str]:
    """By the path that configurations name, where that data lies now.

    Raises:
        DamagedError: the file that says so cannot be read.
    """
    file = experiment / LOCATIONS
    try:
        moved = read_json(file, newest_format=FORMAT).get("moved")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if not isinstance(moved, dict) or not all(isinstance(path, str) for path in moved.values()):
        raise DamagedError(f"{file} does not say where data lies")
    return moved


def set_locations(experiment: Path, moved: dict[str, str]) -> None:
    """Say where data lies now, beside what was said before."""
    known = locations(experiment) | moved
    write_json(experiment / LOCATIONS, {"format": FORMAT, "moved": known})


def find_moved(experiment: Experiment, path: Path) -> int:
    """Take a path for where the experiment's data lies now, if that is the same data. Runs that it is for.

    Raises:
        UserError: there is no data, or none of the runs is made for it.
    """
    from stages.corpus import DataError, find_corpus

    new = str(path.expanduser().absolute())
    by_data: dict[tuple[str, float], list[tuple[Run, str | None]]] = {}
    for run in experiment.runs:
        try:
            data = run.config().data
        except DamagedError:
            continue
        if data.path is not None:
            known = data.sha256 or _first_corpus(run)
            by_data.setdefault((data.path, data.validation_share), []).append((run, known))
    moved: dict[str, str] = {}
    count, found = 0, ""
    for (old, share), entries in by_data.items():
        try:
            corpus = find_corpus(DataConfig(path=new, validation_share=share))
        except DataError as error:
            raise UserError(str(error)) from error
        wanted = {sha256 for _, sha256 in entries if sha256 is not None}
        found = corpus.sha256
        # Where no run says what it is for, nothing contradicts: if the old place is empty, it is taken.
        unknown = not wanted and len(by_data) == 1 and not Path(old).exists()
        if unknown or (wanted and all(corpus.is_called(sha256) for sha256 in wanted)):
            moved[old] = new
            count += len(entries)
    if not moved:
        raise UserError(
            f"{path} holds other data than the runs of {experiment.folder} are made for"
            + (f" (its SHA-256 is {found})" if found else ": they name no data")
        )
    set_locations(experiment.folder, moved)
    return count


def recorded_sha256(runs: Iterable[Run]) -> str | None:
    """What the first of these runs that says so trains on."""
    for run in runs:
        try:
            known = run.config().data.sha256 or _first_corpus(run)
        except DamagedError:
            continue
        if known is not None:
            return known
    return None


def _experiment_of(run: Run) -> Path | None:
    folder = run.folder.absolute().parent
    return folder.parent if folder.name == "runs" else None


def _first_corpus(run: Run) -> str | None:
    """The checksum that the run wrote when it first began to train."""
    try:
        with run.metrics_file.open("rb") as file:
            row = json.loads(file.readline(_LONGEST_ROW))
    except (OSError, ValueError):
        return None
    known = row.get("corpus_sha256") if isinstance(row, dict) else None
    return known if isinstance(known, str) else None


def _of_other_seeds(run: Run, data: DataConfig) -> str | None:
    folder = _experiment_of(run)
    if folder is None:
        return None
    try:
        experiment = open_experiment(folder)
    except UserError:
        return None
    axes = {cell.id: {**cell.axes, "seed": None} for cell in experiment.cells}
    own = axes.get(run.id)
    for other in (experiment.run(cell) for cell, at in axes.items() if at == own and cell != run.id):
        if (known := _first_corpus(other)) is None:
            continue
        try:
            there = other.config().data
        except DamagedError:
            continue
        if (there.path, there.validation_share) == (data.path, data.validation_share):
            return known
    return None
