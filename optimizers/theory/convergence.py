"""A small experiment: how fast delayed Muon converges on a smooth problem, with and without error feedback.

For steps of size eta / sqrt(T) in the spectral norm, the mean over T steps of the gradient's nuclear norm
falls like 1 / sqrt(T) on a smooth function, and a constant delay changes the constant and not the rate (the
claim of arXiv 2606.30634, section 4). Here the function is a mean of log cosh of linear measurements of a
matrix: smooth, convex and not quadratic; gradients are exact, so that the rate is that of the deterministic
case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizers.build import build_optimizer
from optimizers.corrections.build import build_stage_correction

_NAME = "blocks.0.mlp.up.weight"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """f(W) = mean of log cosh(L W R - C)."""

    left: Tensor
    right: Tensor
    offset: Tensor

    def gradient(self, weights: Tensor) -> Tensor:
        """Of f, exactly: L^T tanh(L W R - C) R^T, divided by the number of measurements."""
        residual = torch.tanh(self.left @ weights @ self.right - self.offset)
        return self.left.T @ residual @ self.right.T / residual.numel()


def problem(rows: int = 16, columns: int = 24, measurements: int = 32) -> Problem:
    """A fixed problem with a spread of curvatures."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def spread(size: int) -> Tensor:
        return torch.logspace(0, -1, size, dtype=torch.float64)

    return Problem(
        left=draw(measurements, rows) * spread(rows),
        right=draw(columns, measurements) * spread(columns)[:, None],
        offset=2 * draw(measurements, measurements),
    )


def mean_gradient_norm(*, steps: int, delay: int, coefficient: float, size: float = 0.5) -> float:
    """Mean over `steps` of the nuclear norm of the gradient at the weights computed with.

    Args:
        steps: T; the step size is `size` / sqrt(T) in the spectral norm.
        delay: Updates between the weights of a gradient and those it is applied to.
        coefficient: c of error feedback; 0: none.
        size: eta.
    """
    given = problem()
    rows, columns = given.left.shape[1], given.right.shape[0]
    weights = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.float64))
    optimizer = build_optimizer(
        {_NAME: weights},
        name="muon",
        lr=size / math.sqrt(steps),
        weight_decay=0.0,
        options={"scale": "original", "iteration": "polar-express"},
    )
    options = {"coefficient": coefficient}
    correction = build_stage_correction("error-feedback", options=options, delay=delay, mismatch=0)
    versions = [weights.detach().clone() for _ in range(delay + 1)]
    total = 0.0
    for _ in range(steps):
        gradient = given.gradient(versions[0])
        total += float(torch.linalg.matrix_norm(gradient, "nuc"))
        weights.grad = gradient
        correction.update(optimizer=optimizer, master=[weights], replica=[versions[0]])
        versions.append(versions.pop(0))
    return total / steps


def rate(steps: Sequence[int], norms: Sequence[float]) -> float:
    """Slope of log(norm) against log(T), by least squares: -0.5 is the rate 1 / sqrt(T)."""
    x, y = [math.log(count) for count in steps], [math.log(norm) for norm in norms]
    middle = sum(x) / len(x)
    covariance = sum((a - middle) * b for a, b in zip(x, y, strict=True))
    return covariance / sum((a - middle) ** 2 for a in x)
