"""Where a run's data is now, its checksum, which is the same for all attempts and seeds of a cell, and whose
checkpoints a run takes.

EXPERIMENT/data.json   new paths of data that has moved since config.yaml was written
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    from stages.data.dataset import DataError, find_corpus, find_validation_set

    new = str(path.expanduser().absolute())
    # By path, share held out (None: a validation set), type of tokens and hash.
    by_data: dict[tuple[str, float | None, str, str | None], set[str]] = {}
    # By sources, likewise.
    by_mixture: dict[tuple[tuple[tuple[str, str], ...], float, str, str | None], set[str]] = {}
    for run in experiment.runs:
        try:
            data = run.config().data
        except DamagedError:
            continue
        named: list[tuple[str, float | None, str, str | None]] = [
            (set_path, None, data.dtype, data.validation_sha256.get(name))
            for name, set_path in data.validation.items()
        ]
        if data.path is not None:
            named.insert(0, (data.path, data.validation_share, data.dtype, data.sha256))
        for each in named:
            by_data.setdefault(each, set()).add(run.id)
        if data.sources:
            mixture = tuple(data.sources.items()), data.validation_share, data.dtype, data.sha256
            by_mixture.setdefault(mixture, set()).add(run.id)
    moved: dict[str, str] = {}
    matching: set[str] = set()
    sha256 = ""
    for (old, share, dtype, known), runs in by_data.items():
        try:
            if share is None:
                sha256 = find_validation_set(new, dtype=dtype).sha256
            else:
                sha256 = find_corpus(DataConfig(path=new, validation_share=share, dtype=dtype)).sha256
        except DataError as error:
            raise UserError(str(error)) from error
        if sha256 == known:
            moved[old] = new
            matching |= runs
    present = locations(experiment.folder)
    for (sources, held_out, dtype, known), runs in by_mixture.items():
        now = {name: present.get(old, old) for name, old in sources}
        for name, old in sources:
            # Fails where another source is the one that has moved.
            with suppress(DataError):
                moved_one = DataConfig(sources=now | {name: new}, validation_share=held_out, dtype=dtype)
                sha256 = find_corpus(moved_one).sha256
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
