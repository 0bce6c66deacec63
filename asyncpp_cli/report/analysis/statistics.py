"""Means over seeds, and confidence intervals of differences between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncpp_cli.report.analysis.t_distribution import t_quantile

CONFIDENCE = 0.95
"""Level of the intervals."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over the seeds."""

    mean: float
    std: float | None
    """None for n = 1."""
    n: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval of level `CONFIDENCE`."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def holds_zero(self) -> bool:
        """Whether the difference is not significant."""
        return self.low <= 0 <= self.high


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = None
    if len(known) > 1:
        # `stdev` raises for infinities.
        std = statistics.stdev(known) if all(map(math.isfinite, known)) else math.nan
    return Spread(mean=statistics.fmean(known), std=std, n=len(known))


def welch(first: Spread, second: Spread) -> Interval | None:
    """The interval of the difference of two means of independent samples; None for n = 1.

    Welch, Biometrika 34 (1947): Student's t with the degrees of freedom of Welch and Satterthwaite.
    """
    difference = first.mean - second.mean
    if first.std is None or second.std is None or not math.isfinite(difference):
        return None
    error1, error2 = first.std**2 / first.n, second.std**2 / second.n
    if error1 + error2 == 0:
        return Interval(low=difference, high=difference)
    freedom = (error1 + error2) ** 2 / (error1**2 / (first.n - 1) + error2**2 / (second.n - 1))
    return _around(difference, math.sqrt(error1 + error2), freedom)


def paired(differences: Sequence[float]) -> Interval | None:
    """The interval of the mean of paired differences; None for fewer than two."""
    sample = spread(differences)
    if sample is None or sample.std is None or not math.isfinite(sample.mean):
        return None
    return _around(sample.mean, sample.std / math.sqrt(sample.n), sample.n - 1)


def _around(middle: float, error: float, freedom: float) -> Interval:
    reach = t_quantile((1 + CONFIDENCE) / 2, freedom) * error
    return Interval(low=middle - reach, high=middle + reach)
