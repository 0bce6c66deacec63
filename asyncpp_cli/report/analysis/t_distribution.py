"""Student's t distribution; SciPy is not a run-time dependency."""

from __future__ import annotations

import math

_PRECISION = 1e-15
_MOST_TERMS = 10_000


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
