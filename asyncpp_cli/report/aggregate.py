"""Runs -> cells: seeds averaged, and each cell beside its synchronous counterpart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncpp_cli.report.best import keep_best
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.counterparts import linked
from asyncpp_cli.report.loaded import NAMED_KEYS, Run
from schedules import ScheduleError, is_synchronous


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
    cells, lacking = linked(cells, ignoring=best_over)
    return cells, [*notes, *lacking], choices


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
