"""What differs between two selections of runs: settings, conditions and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from asyncpp_cli.report.analysis.answer import difference_text
from asyncpp_cli.report.analysis.cells import VAL_LOSS, by_seed
from asyncpp_cli.report.analysis.conditions import MACHINE_FIELDS, conditions, distinct
from asyncpp_cli.report.analysis.statistics import pairs
from asyncpp_cli.report.load.run import RunResult


def difference(a: Sequence[RunResult], b: Sequence[RunResult]) -> dict[str, Any]:
    """What differs between two selections of runs, as plain JSON values.

    Returns:
        `settings` and `conditions` (versions of the code, torch and Python, machine and data): the distinct
        values of each side by key, where they differ. `losses`: for each cell the mean validation loss of its
        completed runs on each side, in nats per token, and B minus A over the seeds that both have, with its
        interval; None where unknown.
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
    """Losses by cell: by the axes, without the seed, that all runs have and that tell cells of a side apart.
    Two single cells are compared whatever their axes are, as are all cells of two schedules."""
    shared = [key for key in dict.fromkeys(key for run in (*a, *b) for key in run.axes) if key != "seed"]
    shared = [key for key in shared if all(key in run.axes for run in (*a, *b))]
    shared = [key for key in shared if any(len({repr(run.axes[key]) for run in side}) > 1 for side in (a, b))]
    of_a, of_b = ({_cell(run, shared): _losses_of(side, run, shared) for run in side} for side in (a, b))
    found = []
    for cell in dict.fromkeys((*of_a, *of_b)):
        first, second = of_a.get(cell, {}), of_b.get(cell, {})
        compared = pairs(second, first)
        means = [fmean(losses.values()) if losses else None for losses in (first, second)]
        interval = compared.interval
        found.append(
            {
                "cell": cell,
                "a": means[0],
                "b": means[1],
                "difference": compared.mean,
                "low": None if interval is None else interval.low,
                "high": None if interval is None else interval.high,
                "seeds": compared.seeds,
                "text": difference_text(compared) if first and second else "",
            }
        )
    return found


def _cell(run: RunResult, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={run.axes[key]}" for key in keys if key != "seed")


def _losses_of(side: Sequence[RunResult], like: RunResult, keys: Sequence[str]) -> dict[Any, float]:
    """The losses of the completed runs of a run's cell, by seed."""
    completed = (run for run in side if run.state == "completed")
    return by_seed((run for run in completed if _cell(run, keys) == _cell(like, keys)), VAL_LOSS)
