"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Vyas et al., "SOAP: Improving and stabilizing Shampoo using Adam" (arXiv 2409.11321). As in the authors'
code, the first gradient only sets the bases, and the bases of a step do not include that step's gradient.
Weight decay is applied before the step, as everywhere in this package (theirs is applied after it).
pytorch_optimizer's is not used because it processes matrices one by one and rounds a float64 basis to
float32.

Basis rotation uses the functions here that rotate matrices, a batch of equal shape at a time. A basis is a
batch of orthogonal matrices whose columns are the basis vectors; a side that is not rotated has no basis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from optimizers.rules.base import (
    Group,
    ListOptimizer,
    State,
    States,
    Tensors,
    as_batch,
    buffers,
    by_shape,
    count_step,
    decay,
)

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
    vectors = torch.linalg.eigh(restricted).eigenvectors
    del restricted
    rest = torch.bmm(rest, vectors)
    del vectors
    return rest.where(~kept, bases)


def refresh(symmetric: Tensor, basis: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """One step of power iteration on each matrix, from its current basis.

    Columns are first sorted by their descending share q^T S q; those without a share are kept. Those beyond
    the rank of S, which the decomposition fills from rounding, follow a rule (`complete`).

    Args:
        symmetric: S, of shape (count, n, n), positive semi-definite.
        basis: Q, of the same shape.
        rank: the largest rank that S can have, from the number of gradients in it.

    Returns:
        The orthonormalized S Q with its columns sorted, and the order: positions in Q, of shape (count, n).
    """
    product = torch.bmm(symmetric, basis)
    shares = (basis * product).sum(-2)
    reached = in_range(shares)
    order = shares.where(reached, 0.0).argsort(dim=-1, descending=True, stable=True)
    columns = order.unsqueeze(-2).expand_as(product)
    product = product.where(reached.unsqueeze(-2), basis).gather(-1, columns)
    bases = orthonormal(product)
    if rank < basis.shape[-1]:
        # What follows takes as much memory again.
        del product, symmetric, basis, columns
        bases = complete(bases, reached.new_ones(len(bases), rank))
    return bases, order


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


def greatest_rank(states: Sequence[State], side: str, gradients: int) -> int:
    """The largest rank of the second moment on one side of a matrix, after so many gradients of its shape."""
    rows, columns = states[0]["square"].shape[-2:]
    return gradients * int(columns if side == "left" else rows)


def accumulate(batch: Tensor, states: States, sides: tuple[str, ...], beta: float) -> None:
    """Add a gradient G to the second moments: G G^T on the left, G^T G on the right."""
    for side in sides:
        grams = torch.bmm(batch, batch.mT) if side == "left" else torch.bmm(batch.mT, batch)
        torch._foreach_lerp_(buffers(states, side, list(grams.unbind())), list(grams.unbind()), 1 - beta)


class Soap(ListOptimizer):
    """Adam in the eigenbases Q_L, Q_R. With t counting steps after the first gradient:

        M <- beta1 M + (1 - beta1) G
        V <- beta2 V + (1 - beta2) (Q_L^T G Q_R)^2
        W <- (1 - lr weight_decay) W - lr k Q_L (Q_L^T M Q_R / (sqrt(V) + eps)) Q_R^T
        L <- beta2 L + (1 - beta2) G G^T
        R <- beta2 R + (1 - beta2) G^T G

    where k = sqrt(1 - beta2^t) / (1 - beta1^t) is Adam's bias correction, and every `refresh_interval` steps
    one step of power iteration moves the bases towards the eigenbases of L and R.

    M is kept rotated, as Q_L^T M Q_R, and rotated again when the bases are refreshed, not in every step.
    Keeps M, V, L, R, Q_L and Q_R per matrix: 2 rows columns + 2 rows^2 + 2 columns^2 values. Group settings:
    `lr`, `weight_decay`, `beta1`, `beta2`, `eps`, `refresh_interval`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        step = count_step(states) - 1
        if step > 0:
            decay(parameters, group)
        for positions in by_shape(parameters):
            batch = as_batch([gradients[i] for i in positions])
            chosen = [states[i] for i in positions]
            if step > 0:
                steps = _rotated_adam(batch, chosen, group)
                factor = math.sqrt(1 - group["beta2"] ** step) / (1 - group["beta1"] ** step)
                torch._foreach_add_(
                    [parameters[i] for i in positions], list(steps.unbind()), alpha=-group["lr"] * factor
                )
            accumulate(batch, chosen, ("left", "right"), group["beta2"])
            if step == 0:
                for side in ("left", "right"):
                    store(chosen, f"{side}_basis", eigenbasis(stacked(chosen, side)))
            elif step % group["refresh_interval"] == 0:
                _refresh(chosen, gradients=step + 1)


def _rotated_adam(batch: Tensor, states: States, group: Group) -> Tensor:
    left, right = stacked(states, "left_basis"), stacked(states, "right_basis")
    rotated = rotate(batch, left, right)
    like = list(rotated.unbind())
    first, square = buffers(states, "rotated_first", like), buffers(states, "square", like)
    torch._foreach_lerp_(first, like, 1 - group["beta1"])
    torch._foreach_lerp_(square, list(rotated.square().unbind()), 1 - group["beta2"])
    return rotate_back(as_batch(first) / (as_batch(square).sqrt() + group["eps"]), left, right)


def _refresh(states: States, *, gradients: int) -> None:
    bases = {side: stacked(states, f"{side}_basis") for side in ("left", "right")}
    momentum = rotate_back(stacked(states, "rotated_first"), bases["left"], bases["right"])
    square = stacked(states, "square")
    for side, axis in (("left", -2), ("right", -1)):
        rank = greatest_rank(states, side, gradients)
        bases[side], order = refresh(stacked(states, side), bases[side], rank=rank)
        square = reorder(square, order, axis)
        store(states, f"{side}_basis", bases[side])
    store(states, "square", square)
    store(states, "rotated_first", rotate(momentum, bases["left"], bases["right"]))
