"""Losses compared seed by seed: runs with one seed start from the same weights and see the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from asyncpp_cli.report.analysis.statistics import Interval, paired, spread, welch
from asyncpp_cli.report.load.run import RunResult


def losses_by_seed(
    runs: Sequence[RunResult], *, of_set: str | None = None, averaged: bool = False
) -> dict[Any, float]:
    """The last validation loss of each seed; the mean of several runs with one seed.

    Args:
        runs: of an arm.
        of_set: name of a validation set; None: the headline.
        averaged: whether it is that of the average of the weights.
    """
    field = "val_loss_ema" if averaged else "val_loss"
    losses: dict[Any, list[float]] = {}
    for run in runs:
        measured = run.measurement if of_set is None else run.measurement.sets.get(of_set)
        seed, loss = run.value("seed"), getattr(measured, field, None)
        if seed is not None and loss is not None:
            losses.setdefault(seed, []).append(loss)
    return {seed: fmean(values) for seed, values in losses.items()}


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The losses of two arms by their common seeds."""

    first: Mapping[Any, float]
    second: Mapping[Any, float]
    unpaired: tuple[Any, ...]
    """Seeds that only one arm has, in order; they are not compared."""

    @property
    def seeds(self) -> list[Any]:
        return list(self.first)

    @property
    def differences(self) -> list[float]:
        """Loss of the first arm minus that of the second, by seed."""
        return [loss - self.second[seed] for seed, loss in self.first.items()]

    @property
    def mean(self) -> float | None:
        """Mean difference; None without a common seed."""
        return fmean(self.differences) if self.first else None

    @property
    def interval(self) -> Interval | None:
        """Interval of the mean difference; None for fewer than two seeds."""
        return paired(self.differences)

    @property
    def interval_welch(self) -> Interval | None:
        """The same interval for independent runs, from the two means; usually far wider."""
        first, second = spread(self.first.values()), spread(self.second.values())
        return welch(first, second) if first is not None and second is not None else None


def pairs(first: Mapping[Any, float], second: Mapping[Any, float]) -> Pairs:
    """The losses of two arms by common seed, in the order of the seeds."""
    both = sorted(first.keys() & second.keys(), key=_order)
    return Pairs(
        first={seed: first[seed] for seed in both},
        second={seed: second[seed] for seed in both},
        unpaired=tuple(sorted(first.keys() ^ second.keys(), key=_order)),
    )


def _order(seed: Any) -> tuple[bool, float, str]:
    return (not isinstance(seed, int), seed if isinstance(seed, int) else 0, str(seed))
