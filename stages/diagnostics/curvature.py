"""Curvature of a loss from its gradient: products with the Hessian, and the largest eigenvalue."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RELATIVE_STEP = 1e-5
"""Length of a finite difference's step, over the norm of the point: in float64 the errors of truncation and
of rounding are then both far below 1e-6 of the product."""

_NOTHING_LEFT = 1e-12


def hessian_product(gradient: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """The Hessian at a point times a direction, by a central difference of gradients.

    Unlike a second backward it works with every kernel and hand-written backward of the model.

    Args:
        gradient: of the loss, of float64 tensors `(n)`.
        point: `(n)`, float64.
        direction: `(n)`, float64.
    """
    length = float(direction.norm())
    if length == 0.0:
        return torch.zeros_like(direction)
    step = RELATIVE_STEP * max(float(point.norm()), 1.0) / length
    return (gradient(point + step * direction) - gradient(point - step * direction)) / (2 * step)


def largest_eigenvalue(
    operator: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int
) -> tuple[float, float]:
    """The largest eigenvalue of a symmetric operator, by Lanczos's method with full reorthogonalization.

    It takes the best vector of the space that as many power iterations span, so it needs fewer products
    (Golub and Van Loan, "Matrix Computations", section 10.1), and no large negative eigenvalue misleads it.

    Args:
        operator: of vectors `(n)`.
        start: the first vector, not zero.
        iterations: applications of the operator.

    Returns:
        The eigenvalue (Ritz value), and the norm of A v - value v for its unit vector v: some eigenvalue is
        that close.
    """
    basis = [start / start.norm()]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(iterations):
        product = operator(basis[-1])
        diagonal.append(torch.dot(basis[-1], product))
        scale = product.norm()
        for _ in range(2):
            for vector in basis:
                product = product - torch.dot(vector, product) * vector
        beside.append(product.norm())
        if beside[-1] <= _NOTHING_LEFT * scale:
            break
        basis.append(product / beside[-1])
    matrix = torch.diag(torch.stack(diagonal))
    for row, value in enumerate(beside[: len(diagonal) - 1]):
        matrix[row, row + 1] = matrix[row + 1, row] = value
    values, vectors = torch.linalg.eigh(matrix)
    return float(values[-1]), float(beside[-1] * vectors[-1, -1].abs())
