"""Cells beside those that a folder already holds: which are the same, whether they use the same data, and in
which settings new ones differ from the nearest run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.experiment.run_data import locations, paths_of, set_locations
from asyncpp_cli.runs.experiment_folder import Cell, Experiment
from asyncpp_cli.runs.run_folder import HASH_DIGITS, Run
from asyncpp_cli.runs.settings import config_hash, get, identity
from stages.config.run_config import DataConfig, RunConfig


def with_existing_ids(cells: Sequence[ResolvedCell], existing: Experiment) -> list[ResolvedCell]:
    """The cells, each with the id of its run in the folder, if there is one.

    Ids differ where they name a path of data that has moved, as an axis does.

    Raises:
        UserError: the folder has the same runs with other data.
    """
    by_id = {cell.id: cell for cell in existing.cells}
    by_digest = {cell.id[-HASH_DIGITS:]: cell for cell in existing.cells}
    matched: list[ResolvedCell] = []
    for resolved in cells:
        match = None
        if resolved.cell.id not in by_id and resolved.config.data.trained_paths:
            match = by_digest.get(config_hash(resolved.config)[:HASH_DIGITS])
            if match is not None and _axes_without_path(match) != _axes_without_path(resolved.cell):
                match = None
        matched.append(resolved if match is None else replace(resolved, cell=match))
    renamed = {old.cell.id: new.cell.id for old, new in zip(cells, matched, strict=True)}
    matched = [
        replace(new, cell=structs.replace(new.cell, loss_of=renamed.get(old.cell.loss_of or "")))
        for old, new in zip(cells, matched, strict=True)
    ]
    _refuse_changed_data(matched, existing)
    return matched


def check_same_data(cells: Sequence[ResolvedCell], existing: Experiment) -> None:
    """Refuse to add cells whose data differs from that of the existing runs.

    Args:
        cells: of the template, with the ids that they have in the folder.
        existing: the experiment in the folder.

    Raises:
        UserError: the data has changed.
    """
    from stages.data.dataset import find_corpus

    ids = {cell.id for cell in existing.cells}
    missing = [
        resolved
        for resolved in cells
        if resolved.cell.id not in ids or not existing.run(resolved.cell.id).config_file.exists()
    ]
    for key, data in {_data_key(resolved): resolved.config.data for resolved in missing}.items():
        same_data = [resolved for resolved in cells if resolved.cell.id in ids and _data_key(resolved) == key]
        configs = (_config(existing.run(resolved.cell.id)) for resolved in same_data)
        known = next((config.data.sha256 for config in configs if config is not None), None)
        if known is not None and find_corpus(same_data[0].config.data).sha256 != known:
            raise _changed(data, existing)


def _data_key(resolved: ResolvedCell) -> tuple[object, ...]:
    """What the hash of a cell's data depends on, but for the content."""
    data = resolved.config.data
    return (*data.trained_paths.items(), data.validation_share, data.dtype)


def _config(run: Run) -> RunConfig | None:
    """The configuration of a run; None if it cannot be read."""
    try:
        return run.config()
    except DamagedError:
        return None


def record_locations(cells: Sequence[ResolvedCell], existing: Experiment) -> None:
    """Record the cells' paths of data whose runs name the same data by another path."""
    moved: dict[str, str] = {}
    ids = {cell.id for cell in existing.cells}
    first: dict[str, ResolvedCell] = {}
    for resolved in cells:
        if paths_of(resolved.config.data) and resolved.cell.id in ids:
            first.setdefault(repr(resolved.config.data), resolved)
    known = locations(existing.folder)
    for resolved in first.values():
        old = _config(existing.run(resolved.cell.id))
        old_paths = {} if old is None else paths_of(old.data)
        for key, new in paths_of(resolved.config.data).items():
            before = old_paths.get(key)
            if before is not None and known.get(before, before) != new:
                moved[before] = new
    if moved:
        set_locations(existing.folder, moved)


def _axes_without_path(cell: Cell) -> dict[str, object]:
    of_paths = ("data.path", "data.sources.")
    return {key: value for key, value in cell.axes.items() if not key.startswith(of_paths)}


def _refuse_changed_data(cells: Sequence[ResolvedCell], existing: Experiment) -> None:
    wanted = {resolved.cell.id for resolved in cells}
    unmatched = {repr(_axes_without_path(cell)): cell for cell in existing.cells if cell.id not in wanted}
    ids = {cell.id for cell in existing.cells}
    for resolved in cells if unmatched else []:
        similar = unmatched.get(repr(_axes_without_path(resolved.cell)))
        if similar is None or resolved.cell.id in ids:
            continue
        if (config := _config(existing.run(similar.id))) is None:
            continue
        same_but_data = replace(resolved.config, data=config.data, site=config.site)
        if config.data.sha256 is not None and same_but_data == config:
            new, known = resolved.config.data, config.data.validation_sha256
            other = [name for name, sha256 in new.validation_sha256.items() if known.get(name) != sha256]
            same = new.sha256 == config.data.sha256
            raise _changed(DataConfig(path=new.validation[other[0]]) if same and other else new, existing)


def _changed(data: DataConfig, existing: Experiment) -> UserError:
    if not data.trained_paths:
        return UserError(
            "the text of the Python standard library differs from that of the runs of "
            f"{existing.folder} (another Python?); name another folder"
        )
    where = ", ".join(data.trained_paths.values())
    return UserError(
        f"the data in {where} has changed since the runs of {existing.folder} were made; restore it, or name "
        "another folder"
    )


_MOST_KEYS = 4
"""Keys that a line names."""


def why_new(added: Sequence[ResolvedCell], existing: Experiment) -> list[str]:
    """The keys that make ids new, a line for each set of keys; empty if no run of the folder can be read.

    Each cell is compared with the run that has the most axes in common with it.
    """
    configs: dict[str, RunConfig | None] = {}
    cells: Counter[tuple[str, ...]] = Counter()
    for resolved in added if existing.cells else ():
        nearest = _nearest(resolved.cell, existing)
        if nearest.id not in configs:
            configs[nearest.id] = _config(existing.run(nearest.id))
        if (config := configs[nearest.id]) is not None:
            cells[tuple(differing_keys(config, resolved.config))] += 1
    return [_line(keys, count) for keys, count in cells.items()]


def differing_keys(first: RunConfig, second: RunConfig) -> Iterator[str]:
    """The keys that make two configurations different runs."""
    of_first, of_second = identity(first), identity(second)
    for key in dict.fromkeys((*of_first, *of_second)):
        if of_first.get(key, get(first, key)) != of_second.get(key, get(second, key)):
            yield key


def _nearest(cell: Cell, existing: Experiment) -> Cell:
    """The cell of the folder that has the most axes in common with this one; of several, one that differs in
    the later axes."""

    def alike(other: Cell) -> tuple[int, list[bool]]:
        same = [other.axes.get(key) == value for key, value in cell.axes.items()]
        return sum(same), same

    return max(existing.cells, key=alike)


def _line(keys: Sequence[str], cells: int) -> str:
    named = list(keys[:_MOST_KEYS])
    if len(keys) > _MOST_KEYS:
        named.append(f"{len(keys) - _MOST_KEYS} more")
    if any(key.endswith(".code_sha256") for key in keys):
        named.append("own code that was edited")
    differ = "1 cell differs" if cells == 1 else f"{cells} cells differ"
    return f"{differ} from the nearest run there in {', '.join(named) or 'its data'}"
