"""Noise gain, lag, settling time and variance of momentum as a filter (`optimizers.theory.filters`).

For the tables of `benchmarks.results.delayed_adamw`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import polynomial

from optimizers.theory.filters import Filter, limit, loop

_MARGIN = 1e-9
"""Distance of a root from the unit circle below which the iteration counts as unstable, for rounding."""


@dataclass(frozen=True)
class Point:
    """A filter under a delay, with its largest stable eta h, noise gain and lag in updates."""

    filter: Filter
    limit: float
    noise: float
    lag: float


def point(candidate: Filter, *, delay: int) -> Point:
    """The measures of a filter.

    Raises:
        ValueError: A negative delay.
    """
    return Point(
        filter=candidate,
        limit=limit(candidate, delay=delay),
        noise=noise(candidate),
        lag=lag(candidate, delay=delay),
    )


def noise(point: Filter) -> float:
    """Variance of an update of the weights that compute, for gradients of white noise of variance 1 and eta =
    1: the sum of squares of the impulse response of F C.

    With n the coefficients of the numerator of F C, that is the sum over i and j of n_i n_j beta^|i - j| /
    (1 - beta^2).
    """
    beta, weight, c = point.beta, point.weight, point.coefficient
    numerator = np.convolve([1 - weight * beta, -(1 - weight) * beta], [1 + c, -c])
    apart = np.abs(np.subtract.outer(np.arange(3), np.arange(3)))
    return float(numerator @ beta**apart @ numerator) / (1 - beta**2)


def lag(point: Filter, *, delay: int) -> float:
    """Mean age of the gradients in an update, in updates: the group delay of F C / z^d at frequency 0.

    Error feedback, which looks ahead, takes c off.
    """
    return delay + point.weight * point.beta / (1 - point.beta) - point.coefficient


def settling(point: Filter, *, delay: int, step: float) -> float:
    """Updates in which the slowest part of an error of the weights falls by a factor of e.

    From the largest root of the closed loop; 1 / step for small steps, whatever the filter, and infinite from
    the stability limit on. A long memory shortens it along directions of low curvature, up to a point.

    Args:
        point: The filter.
        delay: Updates between the weights of a gradient and those it is applied to.
        step: eta h, above 0.

    Raises:
        ValueError: A step that is not above 0, or a negative delay.
    """
    slowest = float(np.abs(polynomial.polyroots(_closed(point, delay=delay, step=step))).max())
    return -1 / math.log(slowest) if slowest < 1 - _MARGIN else math.inf


def weight_variance(point: Filter, *, delay: int, step: float) -> float:
    """Stationary variance of the weights in the closed loop, over that of synchronous descent with a small
    step.

    Of y (`optimizers.corrections.error_feedback`), which is evaluated and saved, on curvature h, with white
    noise of variance s^2 on the gradients: E[y^2] / (eta s^2 / 2 h). Near 1 for small steps, whatever the
    filter; infinite from the stability limit on.

    Args:
        point: The filter.
        delay: Updates between the weights of a gradient and those it is applied to.
        step: eta h, above 0.

    Raises:
        ValueError: A step that is not above 0, or a negative delay.
    """
    closed = _closed(point, delay=delay, step=step)
    if np.abs(polynomial.polyroots(closed)).max() >= 1 - _MARGIN:
        return float("inf")
    # Noise enters y through F and the delay: y = -F / z^d (z - beta) / P_closed in powers of z.
    size = len(closed) - 1
    numerator = np.zeros(size)
    numerator[1:3] = -(1 - point.weight) * point.beta, 1 - point.weight * point.beta
    companion = np.zeros((size, size))
    companion[:-1, 1:] = np.eye(size - 1)
    companion[-1] = -closed[:-1]
    entrance = np.zeros(size)
    entrance[-1] = 1.0
    # X = A X A' + b b' is the sum of A^k b b' A'^k, of which each round doubles the number of terms.
    covariance, power = np.outer(entrance, entrance), companion
    while np.abs(power).max() > 1e-12:
        covariance = covariance + power @ covariance @ power.T
        power = power @ power
    return float(numerator @ covariance @ numerator) * 2 * step


def _closed(point: Filter, *, delay: int, step: float) -> np.ndarray:
    """The characteristic polynomial, by ascending power."""
    if not 0 < step < math.inf:
        raise ValueError(f"step is {step:g}, accepted: above 0")
    fixed, scaled = loop(point, delay)
    return polynomial.polyadd(fixed, step * scaled)
