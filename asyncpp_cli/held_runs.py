"""Cells that a folder already holds, under whatever id, and whether new ones would share their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.matrix import ResolvedCell
from asyncpp_cli.run_data import locations, recorded_sha256, set_locations
from asyncpp_cli.runs import Cell, Experiment
from asyncpp_cli.settings import config_hash, copy_of

_DIGITS = 8
"""Of a hash, at the end of an id."""


def as_held(cells: Sequence[ResolvedCell], held: Experiment) -> list[ResolvedCell]:
    """The cells, each under the id that its run has in the folder, if it is there.

    Runs of asyncpp 0.1 are called by where their data lay; and a path on an axis stands in the readable part.

    Raises:
        UserError: the folder's runs are the same but for their data, which has changed.
    """
    by_id = {cell.id: cell for cell in held.cells}
    by_digest = {cell.id[-_DIGITS:]: cell for cell in held.cells}
    moved = locations(held.folder)
    found: list[ResolvedCell] = []
    for resolved in cells:
        there = None
        if resolved.cell.id not in by_id and resolved.config.data.path is not None:
            there = next(
                (
                    cell
                    for digest in _digests(resolved, moved)
                    if (cell := by_digest.get(digest)) is not None
                    and _beside_path(cell) == _beside_path(resolved.cell)
                ),
                None,
            )
        found.append(resolved if there is None else replace(resolved, cell=there))
    _refuse_changed_data(found, held)
    return found


def check_same_data(cells: Sequence[ResolvedCell], held: Experiment) -> None:
    """Refuse to add cells that would train on other data than the runs beside them do.

    Args:
        cells: all that are wanted, under the ids that they have in the folder.
        held: what is there.

    Raises:
        UserError: says whose data has changed.
    """
    from stages.corpus import find_corpus

    ids = {cell.id for cell in held.cells}
    missing = [
        resolved
        for resolved in cells
        if resolved.cell.id not in ids or not held.run(resolved.cell.id).config_file.exists()
    ]
    for path, share in dict.fromkeys(
        (resolved.config.data.path, resolved.config.data.validation_share) for resolved in missing
    ):
        alike = [
            resolved
            for resolved in cells
            if resolved.cell.id in ids
            and (resolved.config.data.path, resolved.config.data.validation_share) == (path, share)
        ]
        known = recorded_sha256(held.run(resolved.cell.id) for resolved in alike)
        if known is not None and not find_corpus(alike[0].config.data).is_called(known):
            raise _changed(path, held)


def note_locations(cells: Sequence[ResolvedCell], held: Experiment) -> None:
    """Where a cell's run names another path for the same data, that data now lies where the cell says."""
    moved: dict[str, str] = {}
    ids = {cell.id for cell in held.cells}
    first: dict[str, ResolvedCell] = {}
    for resolved in cells:
        if resolved.config.data.path is not None and resolved.cell.id in ids:
            first.setdefault(f"{resolved.config.data.path}:{resolved.config.data.sha256}", resolved)
    known = locations(held.folder)
    for resolved in first.values():
        try:
            old = held.run(resolved.cell.id).config().data.path
        except DamagedError:
            continue
        new = resolved.config.data.path
        if old is not None and new is not None and known.get(old, old) != new:
            moved[old] = new
    if moved:
        set_locations(held.folder, moved)


def _digests(resolved: ResolvedCell, moved: dict[str, str]) -> list[str]:
    """What the end of the cell's id may be."""
    path = resolved.config.data.path
    digests = [config_hash(resolved.config)]
    for earlier in (path, *(old for old, new in moved.items() if new == path)):
        config = copy_of(resolved.config)
        config.data.path, config.data.sha256 = earlier, None
        digests.append(config_hash(config))
    return [digest[:_DIGITS] for digest in digests]


def _beside_path(cell: Cell) -> dict[str, object]:
    return {key: value for key, value in cell.axes.items() if key != "data.path"}


def _refuse_changed_data(cells: Sequence[ResolvedCell], held: Experiment) -> None:
    wanted = {resolved.cell.id for resolved in cells}
    strangers = {repr(_beside_path(cell)): cell for cell in held.cells if cell.id not in wanted}
    ids = {cell.id for cell in held.cells}
    for resolved in cells if strangers else []:
        stranger = strangers.get(repr(_beside_path(resolved.cell)))
        if stranger is None or resolved.cell.id in ids:
            continue
        try:
            config = held.run(stranger.id).config()
        except DamagedError:
            continue
        same_but_data = copy_of(resolved.config)
        same_but_data.data, same_but_data.site = config.data, config.site
        if config.data.sha256 is not None and same_but_data == config:
            raise _changed(resolved.config.data.path, held)


def _changed(path: str | None, held: Experiment) -> UserError:
    if path is None:
        return UserError(
            "the text of the Python standard library is another than the runs of "
            f"{held.folder} were made for (another Python?); name another folder"
        )
    return UserError(
        f"the data in {path} has changed since the runs of {held.folder} were made; put it back, or name "
        "another folder"
    )
