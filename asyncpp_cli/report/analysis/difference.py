"""What differs between two selections of runs: settings, conditions and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncpp_cli.report.analysis.conditions import MACHINE_FIELDS, conditions
from asyncpp_cli.report.analysis.statistics import Interval, paired, spread
from asyncpp_cli.report.load.run import RunResult

Values = tuple[list[Any], list[Any]]
"""The distinct values of each side."""

NUMBERS: dict[str, Callable[[RunResult], float | None]] = {
    "val_loss": lambda run: run.measurement.val_loss,
    "bits_per_byte": lambda run: run.measurement.bits_per_byte,
    "tokens_per_second": lambda run: run.measurement.tokens_per_second,
    "seconds": lambda run: None if run.measurement.replayed else run.measurement.seconds,
    "delay": lambda run: run.measurement.delay,
    "bubble": lambda run: run.measurement.bubble,
    "peak_memory": lambda run: max(run.measurement.peak_memory, default=None),
}
"""What is compared: losses in nats per token, `seconds` of training, bytes of the fullest rank."""


@dataclass(frozen=True, kw_only=True)
class NumberPair:
    """A number of a cell on both sides: means over completed runs, None where unknown."""

    a: float | None
    b: float | None
    interval: Interval | None = None
    """95% interval of `b - a` over pairs of runs with one seed; None for fewer than two pairs."""

    @property
    def difference(self) -> float | None:
        """`b - a`."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True, kw_only=True)
class CellPair:
    """A cell that both sides have."""

    axes: Mapping[str, Any]
    """Its coordinates, without the seed; empty if each side is a single cell."""
    runs: tuple[int, int]
    """Number of completed runs of each side."""
    numbers: Mapping[str, NumberPair]
    """By the keys of `NUMBERS`."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs between two selections of runs, A and B."""

    settings: Mapping[str, Values]
    """Configuration keys whose values differ."""
    conditions: Mapping[str, Values]
    """Versions of the code, torch and Python, machine and data that differ."""
    cells: Sequence[CellPair]
    only_a: Sequence[str]
    """Ids of runs whose cell B lacks."""
    only_b: Sequence[str]

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "settings": {key: {"a": a, "b": b} for key, (a, b) in self.settings.items()},
            "conditions": {key: {"a": a, "b": b} for key, (a, b) in self.conditions.items()},
            "cells": [
                {
                    "axes": dict(pair.axes),
                    "runs": {"a": pair.runs[0], "b": pair.runs[1]},
                    "numbers": {
                        name: {
                            "a": number.a,
                            "b": number.b,
                            "difference": number.difference,
                            "interval": None if number.interval is None else asdict(number.interval),
                        }
                        for name, number in pair.numbers.items()
                    },
                }
                for pair in self.cells
            ],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def difference(a: Sequence[RunResult], b: Sequence[RunResult]) -> Difference:
    """What differs between two selections of runs.

    Cells are matched by the axes that both sides have; a cell without a unique match is in `only_a` or
    `only_b`. Two single cells are compared whatever their axes are.
    """
    of_a, of_b = _cells(a), _cells(b)
    only_a: list[str] = []
    only_b: list[str] = []
    if len(of_a) == len(of_b) == 1:
        pairs = [_pair({}, of_a[0], of_b[0])]
    else:
        pairs, only_a, only_b = _matched(of_a, of_b)
    conditions_a, conditions_b = conditions(a), conditions(b)
    return Difference(
        settings=_differing(_settings(a), _settings(b)),
        conditions=_differing(
            {name: conditions_a[name] for name in MACHINE_FIELDS},
            {name: conditions_b[name] for name in MACHINE_FIELDS},
        ),
        cells=pairs,
        only_a=only_a,
        only_b=only_b,
    )


def _settings(runs: Sequence[RunResult]) -> dict[str, list[Any]]:
    """The distinct values of each configuration key, in order of appearance."""
    values: dict[str, list[Any]] = {}
    for run in runs:
        for key, value in (run.config or {}).items():
            known = values.setdefault(key, [])
            if value not in known:
                known.append(value)
    return values


def _differing(a: Mapping[str, list[Any]], b: Mapping[str, list[Any]]) -> dict[str, Values]:
    """The entries with different sets of values."""
    return {
        key: (a.get(key, []), b.get(key, []))
        for key in dict.fromkeys((*a, *b))
        if {repr(value) for value in a.get(key, [])} != {repr(value) for value in b.get(key, [])}
    }


def _cells(runs: Sequence[RunResult]) -> list[list[RunResult]]:
    """The runs grouped by cell: by all axes but the seed."""
    groups: dict[object, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(_label(run.axes, sorted(run.axes)), []).append(run)
    return list(groups.values())


def _label(axes: Mapping[str, Any], keys: Sequence[str]) -> object:
    return tuple((key, repr(axes.get(key))) for key in keys if key != "seed")


def _matched(
    a: Sequence[list[RunResult]], b: Sequence[list[RunResult]]
) -> tuple[list[CellPair], list[str], list[str]]:
    """Cells that both sides have, and the ids of the runs of all others."""
    cells = [*a, *b]
    shared = [key for key in cells[0][0].axes if all(key in cell[0].axes for cell in cells)] if cells else []
    by_label_a, by_label_b = _by_label(a, shared), _by_label(b, shared)
    pairs = []
    for label, of_a in by_label_a.items():
        of_b = by_label_b.get(label, [])
        if len(of_a) == len(of_b) == 1:
            axes = {key: of_a[0][0].axes[key] for key in shared if key != "seed"}
            pairs.append((label, _pair(axes, of_a[0], of_b[0])))
    matched = {label for label, _ in pairs}
    only_a, only_b = (
        [run.id for label, cells in side.items() if label not in matched for cell in cells for run in cell]
        for side in (by_label_a, by_label_b)
    )
    return [pair for _, pair in pairs], only_a, only_b


def _by_label(cells: Sequence[list[RunResult]], keys: Sequence[str]) -> dict[object, list[list[RunResult]]]:
    by_label: dict[object, list[list[RunResult]]] = {}
    for cell in cells:
        by_label.setdefault(_label(cell[0].axes, keys), []).append(cell)
    return by_label


def _pair(axes: Mapping[str, Any], a: Sequence[RunResult], b: Sequence[RunResult]) -> CellPair:
    done_a, done_b = ([run for run in side if run.state == "completed"] for side in (a, b))
    return CellPair(
        axes=axes,
        runs=(len(done_a), len(done_b)),
        numbers={name: _number(value, done_a, done_b) for name, value in NUMBERS.items()},
    )


def _number(
    value: Callable[[RunResult], float | None], a: Sequence[RunResult], b: Sequence[RunResult]
) -> NumberPair:
    by_seed_a, by_seed_b = (
        {run.value("seed"): number for run in side if (number := value(run)) is not None} for side in (a, b)
    )
    mean_a, mean_b = spread(map(value, a)), spread(map(value, b))
    changes = [by_seed_b[seed] - number for seed, number in by_seed_a.items() if seed in by_seed_b]
    return NumberPair(
        a=None if mean_a is None else mean_a.mean,
        b=None if mean_b is None else mean_b.mean,
        interval=paired(changes),
    )
