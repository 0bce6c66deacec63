"""Orthogonalization in four iterations instead of five, with most products on the small Gram matrix.

Three published ideas, put together:

- A tighter norm needs fewer iterations (Boissin et al., "Turbo-Muon", arXiv 2512.04632, rescale the rows by
  the Gram matrix, which moves the polar factor a little). Here the matrix is divided by its Schatten-8 norm
  ||A^2||_F^(1/4) with A = X X^T, which bounds the largest singular value from above and leaves the polar
  factor alone. A and A^2 are those of the first iteration, so it costs nothing.
- Iterating on A, and on the product of the polynomials, in the place of X ("Gram Newton-Schulz"): for an
  m x n matrix with n > 1.5 m these m x m products are fewer. Rounding in bfloat16 would grow, so there X is
  formed after every second iteration.
- The best polynomials for the interval that is left after each (Amsel et al., arXiv 2505.16932).

An accelerator computes the iterations of Muon (`optimizers.rules.muon`) in the form of `in_fewer_operations`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optimizers.shared_options import RESTARTS, is_halved, is_wide

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
    _, rows, columns = x.shape
    each = 1
    if is_wide(rows, columns):
        each = RESTARTS["gram"] if x.dtype == torch.bfloat16 else len(MINIMAX)
    product = _symmetric if fewer else _product
    gram = product(x, x.mT)
    square = product(gram, gram)
    # Norms one by one: the order of summation in a batched reduction may depend on the batch size.
    norms = torch.stack(torch._foreach_norm(square.unbind(), dtype=_wide(x.dtype))).reshape(-1, 1, 1)
    norms = (norms**0.25 * _SAFETY).clamp_min(_SMALLEST)
    # That x is to be divided by them is left to the first product with x: its factor is smaller.
    scale = norms.reciprocal().to(x.dtype)
    gram.mul_(scale**2)
    (a, b, c), *following = COEFFICIENTS
    polynomial = square.mul_(scale**4 * c).add_(gram, alpha=b)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
    factor, pending = polynomial * scale, 1
    for a, b, c in following:
        if pending == each:
            x, pending = _product(factor, x), 0
            gram = product(x, x.mT)
        else:
            gram = _product(_product(polynomial, gram), polynomial)
        if fewer and pending == 0:
            polynomial = _symmetric(gram, gram, gram, beta=b, alpha=c)
        else:
            polynomial = _quadratic(gram, b, c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        factor = _product(polynomial, factor) if pending else polynomial
        pending += 1
    return _product(factor, x)


def in_fewer_operations(
    x: Tensor, coefficients: Sequence[tuple[float, float, float]], *, each: int
) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, for each (a, b, c), with a part of large symmetric products
    and, where X is wide, `each` iterations on A at a time.

    Polynomials of A commute, so all products but those with X are symmetric. Each polynomial is kept as its
    constant and the rest: in bfloat16 their sum would lose the digits of the rest (tested).

    Args:
        x: of shape (count, m, n) with m <= n.
        coefficients: of the iterations.
        each: iterations after which X and A are formed anew; in bfloat16 all at once diverge.
    """
    if not is_wide(*x.shape[-2:]):
        each = 1
    for first in range(0, len(coefficients), each):
        gram = _symmetric(x, x.mT)
        together = coefficients[first : first + each]
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _product(a: Tensor, b: Tensor) -> Tensor:
    """As `bmm`; a single matrix is faster by `mm`."""
    return torch.mm(a[0], b[0]).unsqueeze(0) if len(a) == 1 else torch.bmm(a, b)


def _quadratic(a: Tensor, b: float, c: float) -> Tensor:
    """b A + c A^2 for each matrix A."""
    if len(a) == 1:
        return torch.addmm(a[0], a[0], a[0], beta=b, alpha=c).unsqueeze(0)
    return torch.baddbmm(a, a, a, beta=b, alpha=c)
