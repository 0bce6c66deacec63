"""Runs -> cells: seeds averaged, and each cell beside its synchronous counterpart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncpp_cli.report.best import keep_best
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.loaded import NAMED_KEYS, Run
from schedules import ScheduleError, is_synchronous

CORRECTION = ("error_feedback.", "correction.")
"""Sections of the configuration that correct for delay."""


def aggregate(runs: Sequence[Run]) -> tuple[list[Cell], list[str]]:
    """Cells in the order of their first run, and what a reader must know about the averaging."""
    cells, notes, _ = aggregate_best(runs)
    return cells, notes


def aggregate_best(
    runs: Sequence[Run],
    *,
    keys: Sequence[str] = (),
    best_over: Sequence[str] = (),
    target: float | None = None,
) -> tuple[list[Cell], list[str], list[str]]:
    """As `aggregate`, and which values were kept of those that were tried.

    Args:
        runs: of one or several experiments.
        keys: configuration keys to show whether the cells differ in them or not.
        best_over: configuration keys of which only the best value of each arm is kept (see `keep_best`).
        target: validation loss, nats a token, to say the way to of.
    """
    groups = _group_by_all_but_seed(runs)
    shown, notes = _further_keys(groups, wanted=[*keys, *best_over])
    cells = [_cell(group, shown, target) for group in groups]
    choices: list[str] = []
    if best_over:
        cells, choices = keep_best(cells, best_over)
        cells = [replace(cell, chosen=tuple(best_over)) for cell in cells]
    return _linked(cells, ignoring=best_over), notes, choices


def _without(config: Mapping[str, Any], *prefixes: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith(prefixes)}


def _hashable(mapping: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, repr(value)) for key, value in mapping.items()))


def _group_by_all_but_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with one configuration but for the seed; runs without a readable one go by their axes."""
    groups: dict[object, list[Run]] = {}
    configuration_of_axes: dict[object, object] = {}
    for run in runs:
        if run.config is not None:
            axes = _hashable(_without(run.axes, "seed"))
            configuration_of_axes.setdefault(axes, _hashable(_without(run.config, "seed", "site.")))
    for run in runs:
        if run.config is not None:
            groups.setdefault(_hashable(_without(run.config, "seed", "site.")), []).append(run)
        else:
            axes = _hashable(_without(run.axes, "seed"))
            groups.setdefault(configuration_of_axes.get(axes, axes), []).append(run)
    return list(groups.values())


def _label(run: Run, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(repr(run.value(key)) for key in keys)


def _further_keys(groups: Sequence[Sequence[Run]], *, wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Keys, beside the named ones, that tell the rows apart, and a note if some of them are no axes.

    The keys asked for come first, then the template's own axes. Cells that would still look alike were not
    averaged because their configurations differ; the keys in which they do are added.
    """
    own = {*NAMED_KEYS, *NAMED_KEYS.values(), "seed"}
    of_axes = (key for group in groups for run in group for key in run.axes)
    keys = list(dict.fromkeys(key for key in (*wanted, *of_axes) if key not in own))
    alike: dict[tuple[str, ...], list[Run]] = {}
    for group in groups:
        alike.setdefault(_label(group[0], [*NAMED_KEYS, *keys]), []).append(group[0])
    differing: dict[str, None] = {}
    for same_label in alike.values():
        configs = [run.config for run in same_label if run.config is not None]
        if len(configs) < 2:
            continue
        for key in sorted({key for config in configs for key in config} - {"seed"}):
            if not key.startswith("site.") and len({repr(config.get(key)) for config in configs}) > 1:
                differing[key] = None
    if not differing:
        return keys, []
    note = f"Runs that also differ in {', '.join(differing)} were not averaged: they have rows of their own."
    return [*keys, *differing], [note]


def _cell(group: Sequence[Run], keys: Sequence[str], target: float | None) -> Cell:
    first = next((run for run in group if run.config is not None), group[0])
    schedule = str(first.value("schedule") or "?")
    return Cell(
        schedule=schedule,
        optimizer=str(first.value("optimizer") or "?"),
        error_feedback=float(first.value("error_feedback") or 0.0),
        model=str(first.value("model") or "?"),
        axes={key: first.value(key) for key in keys},
        runs=tuple(group),
        synchronous=_is_synchronous(schedule),
        target=target,
    )


def _is_synchronous(schedule: str) -> bool:
    try:
        return is_synchronous(schedule)
    except ScheduleError:
        return False


def _config(cell: Cell) -> Mapping[str, Any] | None:
    return next((run.config for run in cell.runs if run.config is not None), None)


def _linked(cells: Sequence[Cell], *, ignoring: Sequence[str]) -> list[Cell]:
    """Each cell with its synchronous counterpart, and with the cell that has no correction."""
    ignored = tuple(NAMED_KEYS.get(key, key) for key in ignoring)
    comparison = [_key_without(cell, "schedule.", *CORRECTION, *ignored) for cell in cells]
    candidates: dict[object, list[Cell]] = {}
    for cell, key in zip(cells, comparison, strict=True):
        if cell.synchronous and key is not None:
            candidates.setdefault(key, []).append(cell)
    beside = [
        replace(cell, baseline=_baseline(cell, candidates.get(key, [])))
        for cell, key in zip(cells, comparison, strict=True)
    ]
    arms = [_key_without(cell, *CORRECTION, *ignored) for cell in beside]
    plain = {key: cell for cell, key in zip(beside, arms, strict=True) if not _is_corrected(cell)}
    return [
        replace(cell, uncorrected=plain.get(key) if _is_corrected(cell) else None)
        for cell, key in zip(beside, arms, strict=True)
    ]


def _key_without(cell: Cell, *prefixes: str) -> object:
    """What cells have in common that differ in keys of these prefixes alone; None if nothing is known.

    Micro-batches always count: they are tokens a step.
    """
    config = _config(cell)
    if config is None:
        return None
    common = _without(config, *prefixes, "seed", "site.")
    return _hashable(common | {"schedule.microbatches": config.get("schedule.microbatches")})


def _is_corrected(cell: Cell) -> bool:
    config = _config(cell) or {}
    return cell.error_feedback != 0 or config.get("correction.name") not in (None, "none")


def _baseline(cell: Cell, matched: Sequence[Cell]) -> Cell | None:
    """The matched synchronous cell: `1f1b` where there are several, else the first."""
    first = matched[0] if matched else None
    preferred = next((other for other in matched if other.schedule == "1f1b"), first)
    return None if preferred is cell else preferred
