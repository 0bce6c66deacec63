"""Momentum as a linear filter under delay: stability limit, noise gain, lag, settling time and variance.

The family has a direction (1 - w) G + w M, where M <- beta M + (1 - beta) G (quasi-hyperbolic momentum, Ma
and Yarats, arXiv 1810.06801), and error feedback with a coefficient c (arXiv 2606.30634). w = 1 is plain
momentum, w = beta Nesterov's, w = 0 none. Lion's direction beta1 M + (1 - beta1) G, with an M that does not
hold G yet, is w = beta1 / beta2 with a decay of beta2.

As transfer functions in powers of the delay 1/z, with a gain of 1 for a constant gradient:

    direction        F(z) = (1 - w beta - (1 - w) beta / z) / (1 - beta / z)
    error feedback   C(z) = 1 + c - c / z

On curvature h with steps of eta the loop is eta h F C / (z^d (z - 1)). With a memory m = beta / (1 - beta)
and a look-ahead a = (1 - w) m of the direction, F = (1 - beta) (1 + a - a / z) / (1 - beta / z): the limit
does not tell a and c apart, and Nesterov's momentum has a = beta. They differ in what is evaluated: a moves
the weights, c only those that compute gradients.

For the tables of `benchmarks.results.delayed_adamw`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import polynomial

from optimizers.stability import largest_stable_step, polynomials

_MARGIN = 1e-9
"""Distance of a root from the unit circle below which the iteration counts as unstable, for rounding."""


@dataclass(frozen=True)
class Filter:
    """A point of the family.

    Attributes:
        beta: Decay rate of the momentum, in [0, 1).
        weight: w, the share of the momentum in the direction, in [0, 1].
        coefficient: c of error feedback, at least 0.
    """

    beta: float
    weight: float
    coefficient: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta is {self.beta:g}, accepted: at least 0 and below 1")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight is {self.weight:g}, accepted: from 0 to 1")
        if self.coefficient < 0:
            raise ValueError(f"coefficient is {self.coefficient:g}, accepted: at least 0")


def limit(point: Filter, *, delay: int) -> float:
    """Largest eta h for which the iteration is stable, with gradients `delay` updates old.

    Raises:
        ValueError: A negative delay.
    """
    return largest_stable_step(*loop(point, delay))


def loop(point: Filter, delay: int) -> tuple[np.ndarray, np.ndarray]:
    """P and R of the characteristic polynomial P(z) + eta h R(z), by ascending power.

    Raises:
        ValueError: A negative delay.
    """
    if delay < 0:
        raise ValueError(f"delay is {delay}, accepted: at least 0")
    return polynomials(beta=point.beta, weight=point.weight, coefficient=point.coefficient, delay=delay)


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
