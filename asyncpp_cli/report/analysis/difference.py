"""What differs between two selections of runs: settings, conditions and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from asyncpp_cli.report.analysis.conditions import MACHINE_FIELDS, conditions, distinct
from asyncpp_cli.report.load.run import RunResult


def difference(a: Sequence[RunResult], b: Sequence[RunResult]) -> dict[str, Any]:
    """What differs between two selections of runs, as plain JSON values.

    Returns:
        `settings` and `conditions` (versions of the code, torch and Python, machine and data): the distinct
        values of each side by key, where they differ. `losses`: for each cell the mean validation loss of its
        completed runs on each side, nats per token, and that of B minus that of A; None where unknown.
    """
    of_a, of_b = conditions(a), conditions(b)
    return {
        "settings": _differing(*(distinct(run.config or {} for run in side) for side in (a, b))),
        "conditions": _differing(*({name: of[name] for name in MACHINE_FIELDS} for of in (of_a, of_b))),
        "losses": _losses(a, b),
    }


def _differing(a: Mapping[str, list[Any]], b: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The entries with different sets of values."""
    return {
        key: {"a": a.get(key, []), "b": b.get(key, [])}
        for key in dict.fromkeys((*a, *b))
        if {repr(value) for value in a.get(key, [])} != {repr(value) for value in b.get(key, [])}
    }


def _losses(a: Sequence[RunResult], b: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Losses by cell: by the axes, without the seed, that all runs have. Two single cells are compared
    whatever their axes are."""
    shared = [key for key in dict.fromkeys(key for run in (*a, *b) for key in run.axes) if key != "seed"]
    shared = [key for key in shared if all(key in run.axes for run in (*a, *b))]
    if all(len({_cell(run, list(run.axes)) for run in side}) == 1 for side in (a, b)):
        shared = []
    of_a, of_b = ({_cell(run, shared): _loss(side, run, shared) for run in side} for side in (a, b))
    found = []
    for cell in dict.fromkeys((*of_a, *of_b)):
        first, second = of_a.get(cell), of_b.get(cell)
        change = None if first is None or second is None else second - first
        found.append({"cell": cell, "a": first, "b": second, "difference": change})
    return found


def _cell(run: RunResult, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={run.axes[key]}" for key in keys if key != "seed")


def _loss(side: Sequence[RunResult], like: RunResult, keys: Sequence[str]) -> float | None:
    """The mean loss of the completed runs of a run's cell."""
    losses = [
        run.measurement.val_loss
        for run in side
        if run.state == "completed" and _cell(run, keys) == _cell(like, keys)
    ]
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if known else None
