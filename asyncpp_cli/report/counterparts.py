"""Which synchronous cell a cell is compared with, and which cell that has no correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.loaded import NAMED_KEYS
from asyncpp_cli.report.names import arm_names

CORRECTION = ("error_feedback.", "correction.")
"""Sections of the configuration that correct for delay."""

PREFERRED = "1f1b"
"""The synchronous schedule to compare with where there are several."""

_MOST_COMPARED = 200
"""Cells that a nearest synchronous one is looked for among, and for."""

_MOST_NAMED = 4
"""Keys that a sentence names."""

Settings = frozenset[tuple[str, str]]


def linked(cells: Sequence[Cell], *, ignoring: Sequence[str]) -> tuple[list[Cell], list[str]]:
    """Each cell with its synchronous counterpart and with the cell that has no correction.

    Counterparts differ in the schedule (but for its micro-batches, which are tokens a step) and in
    corrections alone.

    Args:
        cells: of all experiments.
        ignoring: configuration keys that may differ, too.

    Returns:
        The cells in order, and for delayed cells without a counterpart what the nearest differs in.
    """
    ignored = tuple(NAMED_KEYS.get(key, key) for key in ignoring)
    compared = [_settings_without(cell, "schedule.", *CORRECTION, *ignored) for cell in cells]
    candidates: dict[Settings, list[Cell]] = {}
    for cell, settings in zip(cells, compared, strict=True):
        if cell.synchronous and settings is not None:
            candidates.setdefault(settings, []).append(cell)
    beside = [
        replace(cell, baseline=_baseline(cell, candidates.get(settings, []) if settings else []))
        for cell, settings in zip(cells, compared, strict=True)
    ]
    arms = [_settings_without(cell, *CORRECTION, *ignored) for cell in beside]
    plain = {arm: cell for cell, arm in zip(beside, arms, strict=True) if not cell.corrected}
    both = [
        replace(cell, uncorrected=plain.get(arm) if cell.corrected and arm is not None else None)
        for cell, arm in zip(beside, arms, strict=True)
    ]
    return both, _lacking(both, compared)


def _settings_without(cell: Cell, *prefixes: str) -> Settings | None:
    """The cell's settings but for keys of these prefixes, the seed and the site; None if nothing is known."""
    config: Mapping[str, Any] | None = next((run.config for run in cell.runs if run.config is not None), None)
    if config is None:
        return None
    left_out = (*prefixes, "seed", "site.")
    return frozenset(
        (key, repr(value))
        for key, value in config.items()
        if key == "schedule.microbatches" or not key.startswith(left_out)
    )


def _baseline(cell: Cell, matched: Sequence[Cell]) -> Cell | None:
    first = matched[0] if matched else None
    preferred = next((other for other in matched if other.schedule == PREFERRED), first)
    if preferred is None or preferred.schedule == cell.schedule:
        # Itself; or of several that differ in what is ignored alone, another.
        return None
    return preferred


def _lacking(cells: Sequence[Cell], compared: Sequence[Settings | None]) -> list[str]:
    """What keeps delayed cells from being compared with anything, though there are synchronous ones."""
    synchronous = [
        (settings, place)
        for place, settings in enumerate(compared)
        if cells[place].synchronous and settings is not None
    ][:_MOST_COMPARED]
    alone = [
        place
        for place, cell in enumerate(cells)
        if not cell.synchronous and cell.baseline is None and compared[place] is not None
    ]
    if not synchronous or not alone:
        return []
    names = arm_names(cells)
    said: dict[tuple[str, ...], list[str]] = {}
    for place in alone[:_MOST_COMPARED]:
        mine = compared[place] or frozenset()
        nearest = min((mine ^ settings for settings, _ in synchronous), key=len)
        said.setdefault(tuple(sorted({key for key, _ in nearest})), []).append(names[place])
    lines = []
    for keys, arms in said.items():
        more = f" and {len(arms) - 1} more" if len(arms) > 1 else ""
        differing = f"{', '.join(keys[:_MOST_NAMED])}{', ...' if len(keys) > _MOST_NAMED else ''}"
        lines.append(f"No synchronous counterpart for {arms[0]}{more}: the nearest differs in {differing}.")
    return lines
