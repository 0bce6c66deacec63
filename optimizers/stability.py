"""The largest stable step on a quadratic under delay and error feedback, from the characteristic polynomial.

On f(w) = h w^2 / 2 with step eta, momentum beta, delay d and coefficient c the iteration is linear. With a =
eta h and y' = y - u, x = y + c (y - y_previous), gradient h x taken d updates ago, a solution y_t = z^t needs

    none           (z - 1) z^(d+1)            + a [(1 + c) z - c]                             = 0
    ema            (z - 1) (z - beta) z^(d+1) + a (1 - beta) z [(1 + c) z - c]                = 0
    nesterov-ema   (z - 1) (z - beta) z^(d+1) + a (1 - beta) [(1 + beta) z - beta] [(1 + c) z - c] = 0

`ema` is M <- beta M + (1 - beta) G with the step along M, as in Adam; `nesterov-ema` steps along (1 - beta) G
+ beta M, as in Muon. Both are quasi-hyperbolic momentum (1 - w) G + w M (arXiv 1810.06801), with a weight w
of 1 and of beta. For a small enough all roots but one lie well inside the unit circle and that one, near
1, moves inwards; so the limit is the least a at which a root stands on the circle. There a = -P(z) / R(z)
must be real, which is a polynomial equation in cos(theta). Imports no torch.
"""

from __future__ import annotations

import numpy as np
from numpy.polynomial import chebyshev, polynomial

FORMS = ("none", "ema", "nesterov-ema")
"""Forms of momentum."""

MOST_DELAY = 100
"""Largest delay: the time taken grows with its third power."""

MOST_COEFFICIENT = 100.0
"""Largest c of error feedback that rounding leaves room for."""

_ON_THE_CIRCLE = 1e-9
"""Tolerance, for rounding, of roots in cos(theta) outside [-1, 1] or off the real line."""


def stability_limit(form: str, *, beta: float, delay: int, coefficient: float) -> float:
    """Largest eta h for which the iteration is stable.

    Args:
        form: One of `FORMS`.
        beta: Decay rate of the momentum, in [0, 1); not used by `none`.
        delay: Updates between the weights of a gradient and those it is applied to.
        coefficient: c of error feedback; 0: none.

    Raises:
        ValueError: An argument outside its range.
    """
    return largest_stable_step(*characteristic(form, beta=beta, delay=delay, coefficient=coefficient))


def largest_stable_step(fixed: np.ndarray, scaled: np.ndarray) -> float:
    """Least a > 0 with a root of P(z) + a R(z) on the unit circle; P and R as coefficients by ascending
    power."""
    candidates = [-1.0, *_crossings(fixed, scaled)]
    z = np.exp(1j * np.arccos(np.clip(candidates, -1.0, 1.0)))
    steps = -(polynomial.polyval(z, fixed) / polynomial.polyval(z, scaled)).real
    return float(min(step for step in steps if step > 0))


def characteristic(
    form: str, *, beta: float, delay: int, coefficient: float
) -> tuple[np.ndarray, np.ndarray]:
    """P and R of the characteristic polynomial P(z) + eta h R(z), as coefficients by ascending power.

    Raises:
        ValueError: An argument outside its range.
    """
    if form not in FORMS:
        raise ValueError(f"unknown form of momentum {form!r}; accepted: {', '.join(FORMS)}")
    if not 0 <= beta < 1:
        raise ValueError(f"beta is {beta:g}, accepted: at least 0 and below 1")
    if not 0 <= delay <= MOST_DELAY:
        raise ValueError(f"delay is {delay}, accepted: 0 to {MOST_DELAY}")
    if not 0 <= coefficient <= MOST_COEFFICIENT:
        raise ValueError(f"coefficient is {coefficient:g}, accepted: 0 to {MOST_COEFFICIENT:g}")
    weight = {"none": 0.0, "ema": 1.0, "nesterov-ema": beta}[form]
    return polynomials(
        beta=0.0 if form == "none" else beta, weight=weight, coefficient=coefficient, delay=delay
    )


def polynomials(
    *, beta: float, weight: float, coefficient: float, delay: int
) -> tuple[np.ndarray, np.ndarray]:
    """P and R of `characteristic` for the direction (1 - weight) G + weight M."""
    shift = np.zeros(delay + 2)
    shift[-1] = 1.0
    fixed = polynomial.polymul(polynomial.polymul([-1.0, 1.0], shift), [-beta, 1.0])
    direction = [-(1 - weight) * beta, 1 - weight * beta]
    return fixed, polynomial.polymul(direction, [-coefficient, 1 + coefficient])


def best_coefficient(form: str, *, beta: float, delay: int) -> tuple[float, float]:
    """The coefficient, to a hundredth and up to 3, with the largest limit, and that limit."""
    grid = [hundredth / 100 for hundredth in range(301)]
    limits = [stability_limit(form, beta=beta, delay=delay, coefficient=c) for c in grid]
    best = int(np.argmax(limits))
    return grid[best], limits[best]


def _crossings(fixed: np.ndarray, scaled: np.ndarray) -> list[float]:
    """cos(theta) of the points e^(i theta), -1 left out, where P / R is real.

    The imaginary part of P(z) R(1/z) on the circle is a sum of s_k sin(k theta), which is sin(theta) times a
    polynomial in cos(theta) with Chebyshev's polynomials of the second kind, U_(k-1), as its basis.
    """
    products = np.convolve(fixed, scaled[::-1])
    powers = np.arange(len(products)) - (len(scaled) - 1)
    sines = np.zeros(np.abs(powers).max() + 1)
    for power, product in zip(powers, products, strict=True):
        sines[abs(power)] += np.sign(power) * product
    series = np.zeros(len(sines) - 1)
    for k, sine in enumerate(sines[1:], start=1):
        # U_n = 2 (T_n + T_(n-2) + ...), where a T_0 at the end counts once.
        for term in range(k - 1, -1, -2):
            series[term] += sine * (1.0 if term == 0 else 2.0)
    roots = chebyshev.chebroots(chebyshev.chebtrim(series, 1e-14 * np.abs(series).max()))
    return [
        float(root.real)
        for root in roots
        if abs(root.imag) <= _ON_THE_CIRCLE and abs(root.real) <= 1 + _ON_THE_CIRCLE
    ]
