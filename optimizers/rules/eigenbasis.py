"""Rotations of matrices into approximate eigenbases, a batch of equal shape at a time.

Shared by SOAP and basis rotation. A basis is a batch of orthogonal matrices whose columns are the basis
vectors; a side that is not rotated has no basis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from optimizers.rules.base import State, as_batch

Basis = Tensor | None


def rotate(matrices: Tensor, left: Basis, right: Basis) -> Tensor:
    """left^T X right for each X of `matrices`, of shape (count, rows, columns)."""
    if left is not None:
        matrices = torch.bmm(left.mT, matrices)
    return matrices if right is None else torch.bmm(matrices, right)


def rotate_back(matrices: Tensor, left: Basis, right: Basis) -> Tensor:
    """left X right^T, which undoes `rotate`."""
    if left is not None:
        matrices = torch.bmm(left, matrices)
    return matrices if right is None else torch.bmm(matrices, right.mT)


def eigenbasis(symmetric: Tensor) -> Tensor:
    """Eigenvectors of each positive semi-definite matrix of (count, n, n), as columns by descending
    eigenvalue; those of the null space by rule (`complete`)."""
    values, vectors = torch.linalg.eigh(symmetric)
    return complete(vectors.flip(-1), in_range(values.flip(-1)))


def in_range(values: Tensor) -> Tensor:
    """Which values of each of (count, n) are more than rounding beside the largest.

    The vectors of smaller ones are wrong by up to eps / share: they would depend on the order of sums.
    """
    eps = torch.finfo(values.dtype).eps
    lowest = max(values.shape[-1] * eps, eps**0.75)
    reached: Tensor = values > lowest * values.amax(-1, keepdim=True)
    return reached


def complete(bases: Tensor, kept: Tensor) -> Tensor:
    """Replace the columns that a decomposition fills from rounding by those of a basis that follows a rule.

    Of all bases of a subspace it takes the one in which diag(1, ..., n), restricted to it, is diagonal: a
    function of the subspace alone, up to signs, which the methods here do not depend on. A coordinate
    that no gradient reaches is a basis vector of its own, so that it does not move.

    Args:
        bases: of shape (count, n, n).
        kept: (count, up to n): which columns of each are kept, the first ones.
    """
    size = bases.shape[-1]
    kept = F.pad(kept, (0, size - kept.shape[-1])).unsqueeze(-2)
    numbers = torch.arange(1, size + 1, dtype=bases.dtype, device=bases.device)
    rest = bases.masked_fill(kept, 0)
    restricted = torch.bmm(rest.mT, numbers[:, None] * rest)
    # Eigenvalues of the kept ones are negative, so that these come first: no rank is read by the host.
    restricted.diagonal(dim1=-2, dim2=-1).sub_(kept.squeeze(-2) * (size + 1 - numbers))
    return torch.bmm(rest, torch.linalg.eigh(restricted).eigenvectors).where(~kept, bases)


def refresh(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step of power iteration on each matrix, from its current basis.

    Columns are first sorted by their descending share q^T S q; those without a share are kept.

    Args:
        symmetric: S, of shape (count, n, n), positive semi-definite.
        basis: Q, of the same shape.

    Returns:
        The orthonormalized S Q with its columns sorted, and the order: positions in Q, of shape (count, n).
    """
    product = torch.bmm(symmetric, basis)
    shares = (basis * product).sum(-2)
    reached = in_range(shares)
    order = shares.where(reached, 0.0).argsort(dim=-1, descending=True, stable=True)
    columns = order.unsqueeze(-2).expand_as(product)
    return orthonormal(product.where(reached.unsqueeze(-2), basis).gather(-1, columns)), order


def orthonormal(columns: Tensor) -> Tensor:
    """Q of the QR decomposition of each matrix."""
    q: Tensor = torch.linalg.qr(columns).Q
    return q


def reorder(values: Tensor, order: Tensor, axis: int) -> Tensor:
    """`values` (count, rows, columns) with the rows (`axis` -2) or columns (-1) of each matrix in the order
    given."""
    index = order.unsqueeze(-1) if axis == -2 else order.unsqueeze(-2)
    return values.gather(axis, index.expand_as(values))


def stacked(states: Sequence[State], name: str) -> Tensor:
    """The state tensors called `name` as one batch, for reading only."""
    return as_batch([state[name] for state in states])


def store(states: Sequence[State], name: str, values: Tensor) -> None:
    """Write a batch back, one tensor per state."""
    for state, value in zip(states, values, strict=True):
        if name in state:
            state[name].copy_(value)
        else:
            state[name] = value.clone(memory_format=torch.contiguous_format)
