"""Where a run's data is now, its checksum, which is the same for all attempts and seeds of a cell, and whose
checkpoints a run takes.

EXPERIMENT/data.json   new paths of data that has moved since config.yaml was written
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.base.atomic_files import write_bytes
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import config_hash, with_settings
from stages.checkpoint.files import Owner
from stages.config.limits import ConfigError
from stages.config.records import FileRecord, encoded, read_record
from stages.config.run_config import DataConfig, RunConfig

LOCATIONS = "data.json"


class Locations(FileRecord, frozen=True, kw_only=True):
    """What data.json holds."""

    moved: dict[str, str]
    """Present paths of data by their paths in configurations."""


def config_to_train(run: Run) -> RunConfig:
    """The run's configuration with the present path of its data.

    Raises:
        DamagedError: a file of the run or of its experiment cannot be read.
    """
    config = run.config()
    folder = run.folder.absolute().parent
    if folder.name == "runs" and (paths := paths_of(config.data)):
        moved = locations(folder.parent)
        return with_settings(config, {key: moved.get(path, path) for key, path in paths.items()})
    return config


@contextmanager
def naming_config(run: Run) -> Iterator[None]:
    """Refuse a run whose configuration cannot be read, or has a key that is refused, in the block.

    Raises:
        UserError: it is so; the message names the file.
    """
    try:
        yield
    except DamagedError as error:
        raise UserError(str(error)) from error
    except ConfigError as error:
        raise UserError(f"{run.config_file}: {error.key}: {error.message}") from error


def paths_of(data: DataConfig) -> dict[str, str]:
    """The paths of data and validation sets in a configuration, by key."""
    sets = {f"data.validation.{name}": path for name, path in data.validation.items()}
    return data.trained_paths | sets


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
    try:
        return read_record(experiment / LOCATIONS, Locations).moved
    except FileNotFoundError:
        return {}


def set_locations(experiment: Path, moved: dict[str, str]) -> None:
    """Add present paths of data."""
    known = locations(experiment) | moved
    write_bytes(experiment / LOCATIONS, encoded(Locations(moved=known)))


def move_data(experiment: Experiment, path: Path) -> int:
    """Record `path` as the new place of the experiment's data, if it is the same data.

    Of a mixture's sources the others must be where they are known to be.

    Returns:
        The number of runs that use it.

    Raises:
        UserError: there is no data, or no run uses it.
    """
    from stages.data.dataset import DataError

    new = str(path.expanduser().absolute())
    by_data: dict[str, tuple[DataConfig, set[str]]] = {}
    for run in experiment.runs:
        with suppress(DamagedError):
            data = run.config().data
            by_data.setdefault(repr(data), (data, set()))[1].add(run.id)
    present = locations(experiment.folder)
    moved: dict[str, str] = {}
    matching: set[str] = set()
    sha256 = ""
    for data, runs in by_data.values():
        for key, old in paths_of(data).items():
            try:
                sha256, known = _hashes(data, key, new, present)
            except DataError as error:
                if key.startswith("data.sources."):
                    continue  # another source is the one that has moved
                raise UserError(str(error)) from error
            if sha256 == known:
                moved[old] = new
                matching |= runs
    if not moved:
        raise UserError(
            f"{path} holds other data than the runs of {experiment.folder} are made for"
            + (f" (its SHA-256 is {sha256})" if sha256 else ": they name no data")
        )
    set_locations(experiment.folder, moved)
    return len(matching)


def _hashes(data: DataConfig, key: str, path: str, present: Mapping[str, str]) -> tuple[str, str | None]:
    """The hash of the data with another path of a key, and the one that the data had.

    Raises:
        DataError: it cannot be read.
    """
    from stages.data.dataset import find_corpus, find_validation_set

    section, _, name = key.rpartition(".")
    if section == "data.validation":
        held_out = find_validation_set(path, dtype=data.dtype)
        return held_out.sha256, data.validation_sha256.get(name)
    if section == "data.sources":
        now = {source: present.get(old, old) for source, old in data.sources.items()}
        data = replace(data, sources=now | {name: path})
    else:
        data = replace(data, path=path)
    return find_corpus(data).sha256, data.sha256
