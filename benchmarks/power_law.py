"""A product of powers, fitted by least squares, with its intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncpp_cli.report.analysis.t_distribution import t_quantile

_ITERATIONS = 1000
_ENOUGH = 1e-12
"""A relative fall of the sum of squares that ends the search."""


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """`value = exp(constant) * product(factor ** power)`, plus an error that is as large for all values."""

    names: Sequence[str]
    """Of the factors; the constant comes first in the arrays."""
    powers: np.ndarray
    covariance: np.ndarray
    residuals: np.ndarray
    """Values minus those of the law."""

    @property
    def freedom(self) -> int:
        return len(self.residuals) - len(self.powers)

    def interval(self, index: int) -> float:
        """Half of the 95 % interval of a power."""
        return t_quantile(0.975, self.freedom) * math.sqrt(self.covariance[index, index])

    def predict(self, factors: Mapping[str, float]) -> tuple[float, float, float]:
        """The law's value, and the bounds of its 95 % interval."""
        row = np.array([1.0, *(math.log(factors[name]) for name in self.names)])
        middle = float(row @ self.powers)
        reach = t_quantile(0.975, self.freedom) * math.sqrt(float(row @ self.covariance @ row))
        return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def fit(values: Sequence[float], factors: Mapping[str, Sequence[float]]) -> PowerLaw | None:
    """The law of values, which may be below zero by their error.

    Args:
        values: What the law is of.
        factors: By name, one number above zero for each value. Those that do not vary are left out.

    Returns:
        None with too few values, or too few above zero to begin with.
    """
    names = [name for name, column in factors.items() if len(set(column)) > 1]
    rows = np.array([[1.0, *(math.log(factors[name][i]) for name in names)] for i in range(len(values))])
    measured = np.array(values)
    above = measured > 0
    enough = len(values) > len(names) + 1 and np.any(above)
    if not enough or np.linalg.matrix_rank(rows[above]) < len(names) + 1:
        return None
    # The law of the logarithms is near enough to begin with.
    start, *_ = np.linalg.lstsq(rows[above], np.log(measured[above]), rcond=None)
    powers = _descend(start, rows, measured)
    residuals = measured - np.exp(rows @ powers)
    slopes = np.exp(rows @ powers)[:, None] * rows
    noise = float(residuals @ residuals) / (len(values) - len(powers))
    return PowerLaw(
        names=names, powers=powers, covariance=noise * np.linalg.inv(slopes.T @ slopes), residuals=residuals
    )


def _descend(powers: np.ndarray, rows: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The least sum of squares of `measured - exp(rows @ powers)`, by Levenberg's and Marquardt's steps."""
    damping = 1e-3
    off = measured - np.exp(rows @ powers)
    for _ in range(_ITERATIONS):
        slopes = np.exp(rows @ powers)[:, None] * rows
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slopes.T @ off)
        off_there = measured - np.exp(rows @ (powers + step))
        fall = float(off @ off - off_there @ off_there)
        if fall < 0:
            damping *= 4
            continue
        powers, off, damping = powers + step, off_there, damping / 4
        if fall <= _ENOUGH * float(off @ off):
            break
    return powers
