"""Muon: momentum with each matrix replaced by its nearest orthogonal one.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the scale that lets
AdamW's learning rate and decay be reused is that of Liu et al., "Muon is Scalable for LLM Training" (arXiv
2502.16982); the Polar Express coefficients are those of Amsel et al. (arXiv 2505.16932).

For matrices inside blocks only. Embeddings and the output head are two-dimensional too, but their rows are
tokens, which should not be orthogonalized; `optimizers.grouping` assigns them.

Of the three ways to orthogonalize, `gram` takes four iterations instead of five, with most products on the
small Gram matrix. Three published ideas, put together:

- A tighter norm needs fewer iterations (Boissin et al., "Turbo-Muon", arXiv 2512.04632, rescale the rows by
  the Gram matrix, which moves the polar factor a little). Here the matrix is divided by its Schatten-8 norm
  ||A^2||_F^(1/4) with A = X X^T, which bounds the largest singular value from above and leaves the polar
  factor alone. A and A^2 are those of the first iteration, so it costs nothing.
- Iterating on A, and on the product of the polynomials, in the place of X ("Gram Newton-Schulz"): for an
  m x n matrix with n > 1.5 m these m x m products are fewer. Rounding in bfloat16 would grow, so there X is
  formed after every second iteration.
- The best polynomials for the interval that is left after each (Amsel et al., arXiv 2505.16932).

An accelerator computes the two other ways in the form of `in_fewer_operations`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optimizers.options import RESTARTS, is_halved, is_wide
from optimizers.rules.base import (
    Group,
    ListOptimizer,
    States,
    Tensors,
    as_batch,
    buffers,
    by_shape,
    decay,
    ema_momentum,
)

Coefficients = tuple[tuple[float, float, float], ...]
"""One (a, b, c) for each iteration X <- a X + (b A + c A^2) X with A = X X^T."""

NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
ITERATIONS: dict[str, Coefficients] = {"newton-schulz": NEWTON_SCHULZ, "polar-express": POLAR_EXPRESS}

_NORM_MARGIN = {"newton-schulz": 1.0, "polar-express": 1.02, "gram": 1.0}
"""Factor on the Frobenius norm that a matrix is divided by; Polar Express needs singular values below 1."""
_EPSILON = 1e-7


def orthogonalize(matrices: Tensor, iteration: str = "newton-schulz", precision: str = "auto") -> Tensor:
    """Replace the singular values of each matrix by ones, approximately, by matrix-polynomial iterations.

    Each matrix's result has the same bits whichever other matrices are in the batch on a CPU (tested); an
    accelerator's library may choose another kernel for another batch size.

    Args:
        matrices: Of shape (count, rows, columns).
        iteration: `newton-schulz` (singular values end between 0.68 and 1.21), `polar-express`
            (closer to 1), or `gram` (between the two, in four iterations).
        precision: What float32 matrices are computed in: `float32`, `bfloat16`, or `auto`: float32 on
            a CPU, where bfloat16 is slow unless the processor has units for it, else bfloat16.
            Matrices of another type are computed in their own.

    Returns:
        A new tensor of the same shape and type.
    """
    rows, columns = matrices.shape[-2:]
    # Norms one by one: the order of summation in a batched reduction may depend on the batch size.
    norms = torch.stack(torch._foreach_norm(matrices.unbind())).reshape(-1, 1, 1)
    coarse = precision == "bfloat16" or (precision == "auto" and matrices.device.type != "cpu")
    dtype = torch.bfloat16 if matrices.dtype == torch.float32 and coarse else matrices.dtype
    x = torch.empty_like(matrices, dtype=dtype)
    torch.div(matrices, norms * _NORM_MARGIN[iteration] + _EPSILON, out=x)
    if rows > columns:
        x = x.mT
    x = _iterated(x, iteration, fewer=x.device.type != "cpu")
    return (x.mT if rows > columns else x).to(matrices.dtype)


def _iterated(x: Tensor, iteration: str, *, fewer: bool) -> Tensor:
    """X after all iterations; `fewer`: in fewer operations, which rounds otherwise. A CPU computes them as
    they are written."""
    if iteration == "gram":
        return gram_iterations(x, fewer=fewer)
    if fewer:
        return in_fewer_operations(x, ITERATIONS[iteration], per_gram=RESTARTS[iteration])
    for a, b, c in ITERATIONS[iteration]:
        gram = _product(x, x.mT)
        x = _product(_product(gram, gram, gram, beta=b, alpha=c), x, x, beta=a)
    return x


LOWEST = 0.004
"""Singular values of at least this share of the norm end within 13 % of one, apart from `_SAFETY`."""
MINIMAX = (
    (8.340983873487273, -24.597378447425204, 18.22303221266143),
    (3.9779944691149365, -2.9654344331587774, 0.5642720594961459),
    (3.327478708876393, -2.4952376768336983, 0.5108136171602833),
    (2.3085642173048933, -1.6759941338787725, 0.4195738939954741),
)
"""(a, b, c) of a x + b x^3 + c x^5 for each iteration: the closest to 1 on [LOWEST, 1], then on what that
interval becomes, and so on."""

_SAFETY = 1.01
"""Factor that each iteration's input may exceed its interval by, because of rounding; not the last one's."""
COEFFICIENTS = (*((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in MINIMAX[:-1]), MINIMAX[-1])
"""Those of `MINIMAX` with the margin for rounding."""

_SMALLEST = 1e-6
"""Norm of a matrix of zeros."""


def gram_iterations(x: Tensor, *, fewer: bool = False) -> Tensor:
    """Move the singular values of each matrix towards one.

    Args:
        x: of shape (count, m, n) with m <= n, and of a Frobenius norm of about one.
        fewer: compute a part of large products X X^T and of their squares. Not of the others: polynomials
            that are as steep as these diverge then in bfloat16.

    Returns:
        A new tensor of the same shape and type.
    """
    per_gram = 1  # iterations on one Gram matrix, before X and the matrix are formed anew
    if is_wide(*x.shape[-2:]):
        per_gram = RESTARTS["gram"] if x.dtype == torch.bfloat16 else len(MINIMAX)
    product = _symmetric if fewer else _product
    gram = product(x, x.mT)
    square = product(gram, gram)
    # Norms one by one: the order of summation in a batched reduction may depend on the batch size.
    norms = torch.stack(
        torch._foreach_norm(square.unbind(), dtype=torch.promote_types(x.dtype, torch.float32))
    ).reshape(-1, 1, 1)
    norms = (norms**0.25 * _SAFETY).clamp_min(_SMALLEST)
    # That x is to be divided by them is left to the first product with x: its factor is smaller.
    scale = norms.reciprocal().to(x.dtype)
    gram.mul_(scale**2)
    (a, b, c), *following = COEFFICIENTS
    polynomial = square.mul_(scale**4 * c).add_(gram, alpha=b)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
    # X times `factor` is what the iterations so far make of it; `pending` of them are not in X yet.
    factor, pending = polynomial * scale, 1
    for a, b, c in following:
        if pending == per_gram:
            x, pending = _product(factor, x), 0
            gram = product(x, x.mT)
        else:
            gram = _product(_product(polynomial, gram), polynomial)
        squared = product if pending == 0 else _product
        polynomial = squared(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        factor = _product(polynomial, factor) if pending else polynomial
        pending += 1
    return _product(factor, x)


def in_fewer_operations(
    x: Tensor, coefficients: Sequence[tuple[float, float, float]], *, per_gram: int
) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, for each (a, b, c), with a part of large symmetric products
    and, where X is wide, `per_gram` iterations on A at a time.

    Polynomials of A commute, so all products but those with X are symmetric. Each polynomial is kept as its
    constant and the rest: in bfloat16 their sum would lose the digits of the rest (tested).

    Args:
        x: of shape (count, m, n) with m <= n.
        coefficients: of the iterations.
        per_gram: iterations after which X and A are formed anew; in bfloat16 all at once diverge.
    """
    if not is_wide(*x.shape[-2:]):
        per_gram = 1
    for first in range(0, len(coefficients), per_gram):
        gram = _symmetric(x, x.mT)
        together = coefficients[first : first + per_gram]
        (a, b, c), constant = together[0], together[0][0]
        rest = factor = _symmetric(gram, gram, gram, beta=b, alpha=c)
        for following in together[1:]:
            half = _symmetric(rest, gram, gram, beta=a)
            gram = _symmetric(rest, half, half, beta=a)
            a, b, c = following
            rest = _symmetric(gram, gram, gram, beta=b, alpha=c)
            factor = _symmetric(rest, factor, factor, beta=a).add_(rest, alpha=constant)
            constant *= a
        x = torch.baddbmm(x, factor, x, beta=constant)
    return x


def _symmetric(
    a: Tensor, b: Tensor, plus: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """alpha a b + beta plus, which is symmetric: of a large one a quarter is copied. torch has no such
    product."""
    size = a.shape[-2]
    half, out = size // 2 if is_halved(size) else size, a.new_empty(len(a), size, size)
    for rows, columns in ((slice(half), slice(None)), (slice(half, None), slice(half, None))):
        block, left, right = out[:, rows, columns], a[:, rows], b[..., columns]
        if block.numel() == 0:
            continue
        if plus is None:
            torch.bmm(left, right, out=block)
        else:
            torch.baddbmm(plus[:, rows, columns], left, right, beta=beta, alpha=alpha, out=block)
    out[:, half:, :half] = out[:, :half, half:].mT
    return out


def _product(
    a: Tensor, b: Tensor, plus: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """alpha a b + beta plus. A single matrix is faster by `mm` than by `bmm`."""
    if len(a) != 1:
        return torch.bmm(a, b) if plus is None else torch.baddbmm(plus, a, b, beta=beta, alpha=alpha)
    if plus is None:
        return torch.mm(a[0], b[0]).unsqueeze(0)
    return torch.addmm(plus[0], a[0], b[0], beta=beta, alpha=alpha).unsqueeze(0)


def orthogonal_directions(directions: Sequence[Tensor], group: Group) -> Iterator[tuple[list[int], Tensor]]:
    """Orthogonalize `directions` in batches of one shape; yields positions and results of each batch."""
    for positions in by_shape(directions):
        batch = as_batch([directions[i] for i in positions])
        yield positions, orthogonalize(batch, group["iteration"], group["precision"])


def update_scale(rows: int, columns: int, scale: str) -> float:
    """Factor on the orthogonal matrix.

    `match-rms` is 0.2 sqrt(max(rows, columns)): an orthogonal matrix has root mean square 1 /
    sqrt(max(rows, columns)), so every entry then moves by about 0.2 lr, as under AdamW. `original` is
    sqrt(max(1, rows / columns)).
    """
    if scale == "match-rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(ListOptimizer):
    """Muon on matrices, with the matrices of one shape orthogonalized as one batch:

        M <- momentum M + (1 - momentum) G
        Q = (1 - momentum) G + momentum M with `nesterov`, else M
        W <- (1 - lr weight_decay) W - lr scale orthogonalize(Q)

    Keeps one tensor (M) per parameter. Group settings: `lr`, `weight_decay`, `momentum`, `nesterov`, `scale`,
    `iteration`, `precision`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        momenta = buffers(states, "momentum", parameters)
        directions = ema_momentum(momenta, gradients, group["momentum"], nesterov=group["nesterov"])
        decay(parameters, group)
        for positions, steps in orthogonal_directions(directions, group):
            rows, columns = steps.shape[-2:]
            factor = -group["lr"] * update_scale(rows, columns, group["scale"])
            torch._foreach_add_([parameters[i] for i in positions], list(steps.unbind()), alpha=factor)
