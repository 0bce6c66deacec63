"""A product of powers, fitted to logarithms by least squares, with its intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncpp_cli.report.analysis.t_distribution import t_quantile


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """`value = exp(constant) * product(factor ** power)`."""

    names: Sequence[str]
    """Of the factors; the constant comes first in the arrays."""
    powers: np.ndarray
    covariance: np.ndarray
    residuals: np.ndarray
    """Of the logarithms."""

    @property
    def freedom(self) -> int:
        return len(self.residuals) - len(self.powers)

    def interval(self, index: int) -> float:
        """Half of the 95 % interval of a power."""
        return t_quantile(0.975, self.freedom) * math.sqrt(self.covariance[index, index])

    def predict(self, factors: Mapping[str, float]) -> tuple[float, float, float]:
        """The value, and the bounds of the 95 % prediction interval of one more."""
        row = np.array([1.0, *(math.log(factors[name]) for name in self.names)])
        middle = float(row @ self.powers)
        noise = float(self.residuals @ self.residuals) / self.freedom
        reach = t_quantile(0.975, self.freedom) * math.sqrt(float(row @ self.covariance @ row) + noise)
        return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def fit(values: Sequence[float], factors: Mapping[str, Sequence[float]]) -> PowerLaw | None:
    """The law of positive values; None with too few of them. Factors that do not vary are left out."""
    names = [name for name, column in factors.items() if len(set(column)) > 1]
    rows = np.array([[1.0, *(math.log(factors[name][i]) for name in names)] for i in range(len(values))])
    if len(values) <= len(names) + 1 or np.linalg.matrix_rank(rows) < len(names) + 1:
        return None
    logs = np.log(np.array(values))
    powers, *_ = np.linalg.lstsq(rows, logs, rcond=None)
    residuals = logs - rows @ powers
    noise = float(residuals @ residuals) / (len(values) - len(powers))
    return PowerLaw(
        names=names, powers=powers, covariance=noise * np.linalg.inv(rows.T @ rows), residuals=residuals
    )
