"""Where a run's data is now, its checksum, which is the same for all attempts and seeds of a cell, and whose
checkpoints a run takes.

EXPERIMENT/data.json   new paths of data that has moved since config.yaml was written
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from asyncpp_cli.atomic_files import read_json, write_json
from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.experiment.settings import config_hash
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.run_folder import Run
from stages.checkpoint.files import Owner
from stages.config import DataConfig, RunConfig

FORMAT = 1
LOCATIONS = "data.json"
_LONGEST_ROW = 1 << 20


def config_to_train(run: Run) -> RunConfig:
    """The run's configuration with the present path of its data and the data's checksum.

    Runs of asyncpp 0.1 have no checksum in their configuration: it is that of the data on which the run, or
    another seed of its cell, began to train.

    Raises:
        DamagedError: a file of the run or of its experiment cannot be read.
    """
    config = run.config()
    recorded = config.data.sha256 or _first_corpus(run) or _corpus_of_other_seeds(run, config.data)
    config.data.sha256 = recorded
    experiment = _experiment_of(run)
    if config.data.path is not None and experiment is not None:
        config.data.path = locations(experiment).get(config.data.path, config.data.path)
    return config


def owners_of(run: Run) -> list[Owner]:
    """The run as its checkpoints name it; then the one that saved the checkpoint it continues, if any.

    Raises:
        DamagedError: a file of the run cannot be read.
    """
    lineage = run.lineage()
    own = Owner(run=run.id, config_sha256=config_hash(run.config()))
    return [own] if lineage is None else [own, lineage.saved_by]


def locations(experiment: Path) -> dict[str, str]:
    """The present paths of data by their paths in configurations.

    Raises:
        DamagedError: data.json cannot be read.
    """
    file = experiment / LOCATIONS
    try:
        moved = read_json(file, newest_format=FORMAT).get("moved")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if not isinstance(moved, dict) or not all(isinstance(path, str) for path in moved.values()):
        raise DamagedError(f"{file} has no paths of data in `moved`")
    return moved


def set_locations(experiment: Path, moved: dict[str, str]) -> None:
    """Add present paths of data."""
    known = locations(experiment) | moved
    write_json(experiment / LOCATIONS, {"format": FORMAT, "moved": known})


def move_data(experiment: Experiment, path: Path) -> int:
    """Record `path` as the new place of the experiment's data, if it is the same data.

    Returns:
        The number of runs that use it.

    Raises:
        UserError: there is no data, or no run uses it.
    """
    from stages.data.dataset import DataError, find_corpus

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
    count, sha256 = 0, ""
    for (old, share), entries in by_data.items():
        try:
            corpus = find_corpus(DataConfig(path=new, validation_share=share))
        except DataError as error:
            raise UserError(str(error)) from error
        checksums = {known for _, known in entries if known is not None}
        sha256 = corpus.sha256
        # Without a known checksum the data is accepted if there is none at the old path.
        unknown = not checksums and len(by_data) == 1 and not Path(old).exists()
        if unknown or checksums == {corpus.sha256}:
            moved[old] = new
            count += len(entries)
    if not moved:
        raise UserError(
            f"{path} holds other data than the runs of {experiment.folder} are made for"
            + (f" (its SHA-256 is {sha256})" if sha256 else ": they name no data")
        )
    set_locations(experiment.folder, moved)
    return count


def recorded_sha256(runs: Iterable[Run]) -> str | None:
    """The data's checksum, from the first of these runs that has one."""
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
    """The checksum in the run's first row of metrics."""
    try:
        with run.metrics_file.open("rb") as file:
            row = json.loads(file.readline(_LONGEST_ROW))
    except (OSError, ValueError):
        return None
    known = row.get("corpus_sha256") if isinstance(row, dict) else None
    return known if isinstance(known, str) else None


def _corpus_of_other_seeds(run: Run, data: DataConfig) -> str | None:
    folder = _experiment_of(run)
    if folder is None:
        return None
    try:
        experiment = open_experiment(folder)
    except UserError:
        return None
    axes = {cell.id: {**cell.axes, "seed": None} for cell in experiment.cells}
    own = axes.get(run.id)
    same_cell = [experiment.run(id) for id, values in axes.items() if values == own and id != run.id]
    for other in same_cell:
        if (known := _first_corpus(other)) is None:
            continue
        try:
            other_data = other.config().data
        except DamagedError:
            continue
        if (other_data.path, other_data.validation_share) == (data.path, data.validation_share):
            return known
    return None
