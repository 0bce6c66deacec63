"""Means over seeds, and confidence intervals of differences between them.

Runs with one seed start from the same weights and see the same data, so losses are compared pair by pair.
Student's t is computed here, since SciPy is not a run-time dependency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

CONFIDENCE = 0.95
"""Level of the intervals."""

MOST_FACTOR = 4.0
"""Factor that an interval of a ratio may span before it says nothing."""

CANNOT_BE_TOLD = "cannot be told"
"""Text of a ratio whose interval says nothing."""

_PRECISION = 1e-15
_MOST_TERMS = 10_000


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation (n - 1) over the seeds."""

    mean: float
    std: float | None
    """None for n = 1."""
    n: int

    @property
    def interval(self) -> Interval | None:
        """Interval of the mean, by Student's t; None for n = 1, or if a value is not finite."""
        if self.std is None or not math.isfinite(self.mean):
            return None
        return _around(self.mean, self.std / math.sqrt(self.n), self.n - 1)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval of level `CONFIDENCE`."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def exp(self) -> Interval:
        """The interval of the quantity whose logarithm has this one."""
        return Interval(low=exp(self.low), high=exp(self.high))

    def as_factors(self, middle: float) -> Interval:
        """The interval around a positive number whose logarithm has one as wide as this.

        By products, so that rounding leaves the number inside: it may be without width.
        """
        return Interval(low=middle * exp(-self.half_width), high=middle * exp(self.half_width))

    @property
    def holds_zero(self) -> bool:
        """Whether the difference is not significant."""
        return self.low <= 0 <= self.high

    @property
    def says_nothing(self) -> bool:
        """Whether the interval of a ratio or of a speed spans more than a factor of `MOST_FACTOR`."""
        return not 0 < self.low <= self.high <= self.low * MOST_FACTOR


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = None
    if len(known) > 1:
        # `stdev` raises for infinities.
        std = stdev(known) if all(map(math.isfinite, known)) else math.nan
    return Spread(mean=_mean(known), std=std, n=len(known))


def _mean(values: Sequence[float]) -> float:
    # `fmean` raises for infinities of both signs.
    return fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


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
    return None if sample is None else sample.interval


def ratio_text(ratio: float | None, interval: Interval | None) -> str | None:
    """A ratio as text, with the ends of its interval: they are not as far from it. None without a ratio."""
    if ratio is None or interval is None:
        return None if ratio is None else f"{ratio:.2f}"
    return (
        CANNOT_BE_TOLD if interval.says_nothing else f"{ratio:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
    )


def exp(value: float) -> float:
    """The exponential of a number; infinite where a float cannot hold it."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _around(middle: float, error: float, freedom: float) -> Interval:
    reach = t_quantile((1 + CONFIDENCE) / 2, freedom) * error
    return Interval(low=middle - reach, high=middle + reach)


def t_probability(t: float, df: float) -> float:
    """Cumulative distribution function at `t`.

    By the regularised incomplete beta function: Abramowitz and Stegun, Handbook of Mathematical Functions,
    26.7.1 and 26.5.8.

    Args:
        t: the value.
        df: degrees of freedom, above 0; may be fractional.
    """
    total = df + t * t
    tail = 0.5 * _regularised_beta(df / 2, 0.5, df / total, t * t / total)
    return 1 - tail if t > 0 else tail


@functools.cache
def t_quantile(probability: float, df: float) -> float:
    """The value `t` with `t_probability(t, df) == probability`.

    Args:
        probability: above 0.5 and below 1.
        df: degrees of freedom, above 0; may be fractional.
    """
    if not 0.5 < probability < 1:
        raise ValueError(f"probability {probability}: accepted are values between 0.5 and 1")
    low, high = 0.0, 1.0
    while t_probability(high, df) < probability:
        low, high = high, high * 2
    while high - low > 4e-16 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_probability(middle, df) < probability:
            low = middle
        else:
            high = middle
    return high


def _regularised_beta(a: float, b: float, x: float, rest: float) -> float:
    """I_x(a, b); `rest` is 1 - x, passed to keep its digits."""
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        # The continued fraction converges faster for the other tail.
        return 1 - _regularised_beta(b, a, rest, x)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log(rest) - log_beta) / a
    return front / _continued_fraction(a, b, x)


def _continued_fraction(a: float, b: float, x: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)) of Abramowitz and Stegun 26.5.8, by Lentz's method from the front."""
    value, upper, lower = 1.0, 1.0, 0.0
    for term in range(1, _MOST_TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + term - 1) * (a + term))
        else:
            d = m * (b - m) * x / ((a + term - 1) * (a + term))
        lower = 1 / (1 + d * lower)
        upper = 1 + d / upper
        value *= upper * lower
        if abs(upper * lower - 1) < _PRECISION:
            break
    return value


@dataclass(kw_only=True, eq=False)
class Pairs:
    """The losses of two arms by their common seeds."""

    first: Mapping[Any, float]
    second: Mapping[Any, float]
    unpaired: tuple[Any, ...]
    """Seeds that only one arm has, in order; they are not compared."""

    def __post_init__(self) -> None:
        self.seeds = list(self.first)
        self.differences = [loss - self.second[seed] for seed, loss in self.first.items()]
        """Loss of the first arm minus that of the second, by seed."""
        self.mean = _mean(self.differences) if self.first else None
        """Mean difference; None without a common seed."""
        self.interval = paired(self.differences)
        """Interval of the mean difference; None for fewer than two seeds."""

    @property
    def interval_welch(self) -> Interval | None:
        """Interval of the difference as if runs were independent, from the two means; usually far wider."""
        first, second = spread(self.first.values()), spread(self.second.values())
        return welch(first, second) if first is not None and second is not None else None


NO_PAIRS = Pairs(first={}, second={}, unpaired=())


def pairs(first: Mapping[Any, float], second: Mapping[Any, float]) -> Pairs:
    """The losses of two arms by common seed, in the order of the seeds; `NO_PAIRS` if one has no loss."""
    if not first or not second:
        return NO_PAIRS
    both = sorted(first.keys() & second.keys(), key=_order)
    return Pairs(
        first={seed: first[seed] for seed in both},
        second={seed: second[seed] for seed in both},
        unpaired=tuple(sorted(first.keys() ^ second.keys(), key=_order)),
    )


def _order(seed: Any) -> tuple[bool, float, str]:
    return (not isinstance(seed, int), seed if isinstance(seed, int) else 0, str(seed))
