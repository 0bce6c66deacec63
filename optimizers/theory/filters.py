"""Momentum as a linear filter under delay: the stability limit of one family.

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
the weights, c only those that compute gradients. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizers.theory.stability import largest_stable_step, polynomials


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
