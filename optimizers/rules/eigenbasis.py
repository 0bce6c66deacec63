"""Rotations of matrices into approximate eigenbases, a batch of equal shape at a time.

Shared by SOAP and basis rotation. A basis is a batch of orthogonal matrices whose columns are the basis
vectors; a side that is not rotated has no basis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
    """Eigenvectors of each matrix of (count, n, n), as columns by descending eigenvalue."""
    vectors: Tensor = torch.linalg.eigh(symmetric).eigenvectors
    return vectors.flip(-1)


def refresh(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step of power iteration on each matrix, from its current basis.

    Columns are first sorted by their descending share q^T S q.

    Args:
        symmetric: S, of shape (count, n, n).
        basis: Q, of the same shape.

    Returns:
        The orthonormalized S Q with its columns sorted, and the order: positions in Q, of shape (count, n).
    """
    product = torch.bmm(symmetric, basis)
    order = (basis * product).sum(-2).argsort(dim=-1, descending=True, stable=True)
    columns = order.unsqueeze(-2).expand_as(product)
    return torch.linalg.qr(product.gather(-1, columns)).Q, order


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
