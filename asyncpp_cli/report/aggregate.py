"""Runs -> cells: seeds averaged, and each cell beside its synchronous counterpart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncpp_cli.report.measure import Measurement
from schedules import ScheduleError, is_synchronous

NAMED_KEYS = {
    "schedule": "schedule.name",
    "optimizer": "optimizer.name",
    "error_feedback": "error_feedback.coefficient",
    "model": "model.name",
}
"""The axes that have a column of their own, by the name that templates give them."""

STATES_BY_WEIGHT = ("failed", "unreadable", "interrupted", "running", "pending", "missing", "completed")
"""A cell has the state of the run that most needs attention: the first of these that one of its runs has."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as the report sees it, whatever is left of its folder."""

    id: str
    axes: Mapping[str, Any]
    """Its point in the matrix, by the template's axis names."""
    config: Mapping[str, Any] | None
    """Its resolved configuration by dotted key; None if it could not be read."""
    state: str
    """One of `STATES_BY_WEIGHT`."""
    reason: str | None = None
    """Why it failed, was interrupted or cannot be read."""
    measurement: Measurement = field(default_factory=Measurement)
    bubble_predicted: float | None = None
    """Share of the steady state in which a rank waits by the schedule alone: equal stages, free messages."""
    problems: tuple[str, ...] = ()
    """What is wrong with its files although its numbers could be used."""

    def value(self, key: str) -> Any:
        """The value of a configuration key or axis; None if unknown."""
        dotted = NAMED_KEYS.get(key, key)
        if self.config is not None:
            return self.config.get(dotted)
        return self.axes.get(key, self.axes.get(dotted))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over the seeds."""

    mean: float
    std: float | None
    """None for n = 1: one run says nothing about the spread."""
    n: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the matrix, its seeds averaged."""

    schedule: str
    optimizer: str
    error_feedback: float
    model: str
    axes: Mapping[str, Any]
    """Further keys in which cells differ, with this cell's value."""
    runs: tuple[Run, ...]
    state: str
    reasons: tuple[str, ...]
    """Why runs failed, were interrupted or cannot be read, each beginning with the run's id."""
    val_loss: Spread | None
    bits_per_byte: Spread | None
    tokens_per_second: Spread | None
    bubble: Spread | None
    unigram_bits_per_byte: float | None
    bubble_predicted: float | None
    delay: int | None
    synchronous: bool
    baseline: Cell | None = None
    """The synchronous cell that differs in schedule and error feedback alone; None for itself."""

    @property
    def n(self) -> int:
        """Completed runs: the ones that the means are taken over."""
        return len(completed(self.runs))

    @property
    def gap(self) -> float | None:
        """Validation loss of this cell minus that of its synchronous counterpart, in nats a token."""
        if self.baseline is None or self.val_loss is None or self.baseline.val_loss is None:
            return None
        return self.val_loss.mean - self.baseline.val_loss.mean

    @property
    def throughput_ratio(self) -> float | None:
        """Tokens a second of this cell over those of its synchronous counterpart."""
        mine, base = self.tokens_per_second, self.baseline.tokens_per_second if self.baseline else None
        return mine.mean / base.mean if mine is not None and base is not None and base.mean > 0 else None


def completed(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.state == "completed"]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the values that there are; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = None
    if len(known) > 1:
        # `stdev` raises for infinities; a diverged seed makes the spread as meaningless as the mean.
        std = statistics.stdev(known) if all(map(math.isfinite, known)) else math.nan
    return Spread(mean=statistics.fmean(known), std=std, n=len(known))


def aggregate(runs: Sequence[Run]) -> tuple[list[Cell], list[str]]:
    """Cells in the order of their first run, and what a reader must know about the averaging."""
    groups = _group_by_all_but_seed(runs)
    keys, notes = _further_keys(groups)
    cells = [_cell(group, keys) for group in groups]
    return [replace(cell, baseline=_baseline(cell, cells)) for cell in cells], notes


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


def _further_keys(groups: Sequence[Sequence[Run]]) -> tuple[list[str], list[str]]:
    """Keys, beside the named ones, that tell the rows apart, and a note if some of them are no axes.

    The template's own axes come first. Cells that would still look alike were not averaged because their
    configurations differ; the keys in which they do are added.
    """
    own = {*NAMED_KEYS, *NAMED_KEYS.values(), "seed"}
    keys = list(dict.fromkeys(key for group in groups for run in group for key in run.axes if key not in own))
    alike: dict[tuple[str, ...], list[Run]] = {}
    for group in groups:
        alike.setdefault(_label(group[0], [*NAMED_KEYS, *keys]), []).append(group[0])
    differing: dict[str, None] = {}
    for same_label in alike.values():
        configs = [run.config for run in same_label if run.config is not None]
        for key in sorted({key for config in configs for key in config} - {"seed"}):
            if not key.startswith("site.") and len({repr(config.get(key)) for config in configs}) > 1:
                differing[key] = None
    if not differing:
        return keys, []
    note = f"Runs that also differ in {', '.join(differing)} were not averaged: they have rows of their own."
    return [*keys, *differing], [note]


def _cell(group: Sequence[Run], keys: Sequence[str]) -> Cell:
    first = next((run for run in group if run.config is not None), group[0])
    done = [run.measurement for run in completed(group)]
    schedule = str(first.value("schedule") or "?")
    return Cell(
        schedule=schedule,
        optimizer=str(first.value("optimizer") or "?"),
        error_feedback=float(first.value("error_feedback") or 0.0),
        model=str(first.value("model") or "?"),
        axes={key: first.value(key) for key in keys},
        runs=tuple(group),
        state=min((run.state for run in group), key=STATES_BY_WEIGHT.index),
        reasons=tuple(f"{run.id}: {run.state}: {run.reason}" for run in group if run.reason is not None),
        val_loss=spread(one.val_loss for one in done),
        bits_per_byte=spread(one.bits_per_byte for one in done),
        tokens_per_second=spread(one.tokens_per_second for one in done),
        bubble=spread(one.bubble for one in done),
        unigram_bits_per_byte=_first(one.unigram_bits_per_byte for one in done),
        bubble_predicted=_first(run.bubble_predicted for run in group),
        delay=max((one.delay for one in done if one.delay is not None), default=None),
        synchronous=_is_synchronous(schedule),
    )


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _is_synchronous(schedule: str) -> bool:
    try:
        return is_synchronous(schedule)
    except ScheduleError:
        return False


def _comparison_key(cell: Cell) -> object:
    """What a cell and its synchronous counterpart have in common; micro-batches count: tokens a step."""
    run = next((run for run in cell.runs if run.config is not None), None)
    if run is None or run.config is None:
        return None
    common = _without(run.config, "schedule.", "error_feedback.", "correction.", "seed", "site.")
    return _hashable(common | {"microbatches": run.config.get("schedule.microbatches")})


def _baseline(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The matched synchronous cell: `1f1b` where there are several, else the first."""
    key = _comparison_key(cell)
    if key is None:
        return None
    matched = [other for other in cells if other.synchronous and _comparison_key(other) == key]
    preferred = next(
        (other for other in matched if other.schedule == "1f1b"), matched[0] if matched else None
    )
    return None if preferred is cell else preferred
