"""Means over seeds, and how sure a difference between two of them is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncpp_cli.report.student import t_quantile

CONFIDENCE = 0.95
"""Share of experiments like this one whose interval holds the true difference."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over the seeds."""

    mean: float
    std: float | None
    """None for n = 1: one run says nothing about the spread."""
    n: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval, of level `CONFIDENCE`."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def holds_zero(self) -> bool:
        """Whether the difference cannot be told from none."""
        return self.low <= 0 <= self.high


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


def welch(one: Spread, other: Spread) -> Interval | None:
    """The interval of the mean of `one` minus that of `other`, whose spreads may differ; None for n = 1.

    Welch, Biometrika 34 (1947): Student's t with the degrees of freedom of Welch and Satterthwaite. The
    samples are taken for independent.
    """
    difference = one.mean - other.mean
    if one.std is None or other.std is None or not math.isfinite(difference):
        return None
    mine, theirs = one.std**2 / one.n, other.std**2 / other.n
    if mine + theirs == 0:
        return Interval(low=difference, high=difference)
    freedom = (mine + theirs) ** 2 / (mine**2 / (one.n - 1) + theirs**2 / (other.n - 1))
    return _around(difference, math.sqrt(mine + theirs), freedom)


def paired(differences: Sequence[float]) -> Interval | None:
    """The interval of the mean of differences, each of two runs with one seed; None for fewer than two."""
    of_pairs = spread(differences)
    if of_pairs is None or of_pairs.std is None or not math.isfinite(of_pairs.mean):
        return None
    return _around(of_pairs.mean, of_pairs.std / math.sqrt(of_pairs.n), of_pairs.n - 1)


def _around(middle: float, error: float, freedom: float) -> Interval:
    reach = t_quantile((1 + CONFIDENCE) / 2, freedom) * error
    return Interval(low=middle - reach, high=middle + reach)
