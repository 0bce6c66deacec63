"""Muon: momentum with each matrix replaced by its nearest orthogonal one.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the scale that lets
AdamW's learning rate and decay be reused is that of Liu et al., "Muon is Scalable for LLM Training" (arXiv
2502.16982); the Polar Express coefficients are those of Amsel et al. (arXiv 2505.16932).

For matrices inside blocks only. Embeddings and the output head are two-dimensional too, but their rows are
tokens, which should not be orthogonalized; `optimizers.grouping` assigns them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optimizers.rules.base import (
    Group,
    ListOptimizer,
    State,
    as_batch,
    buffers,
    by_shape,
    decay,
    ema_momentum,
)
from optimizers.rules.gram_iteration import gram_iterations, in_fewer_operations
from optimizers.shared_options import RESTARTS

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
            (closer to 1), or `gram` (between the two, in four iterations; `optimizers.rules.gram_iteration`).
        precision: What float32 matrices are computed in: `float32`, `bfloat16`, or `auto`: float32 on
            a CPU, where bfloat16 is slow unless the processor has units for it, else bfloat16.
            Matrices of another type are computed in their own.

    Returns:
        A new tensor of the same shape and type.
    """
    rows, columns = matrices.shape[-2:]
    # Norms one by one: the order of summation in a batched reduction may depend on the batch size.
    norms = torch.stack(torch._foreach_norm(matrices.unbind())).reshape(-1, 1, 1)
    x = torch.empty_like(matrices, dtype=_compute_dtype(matrices, precision))
    torch.div(matrices, norms * _NORM_MARGIN[iteration] + _EPSILON, out=x)
    if rows > columns:
        x = x.mT
    x = _iterated(x, iteration, fewer=x.device.type != "cpu")
    return (x.mT if rows > columns else x).to(matrices.dtype)


def _iterated(x: Tensor, iteration: str, *, fewer: bool) -> Tensor:
    """`fewer`: in fewer operations (`optimizers.rules.gram_iteration`). A CPU computes as it always has."""
    if iteration == "gram":
        return gram_iterations(x, fewer=fewer)
    if fewer:
        return in_fewer_operations(x, ITERATIONS[iteration], each=RESTARTS[iteration])
    for a, b, c in ITERATIONS[iteration]:
        x = _advance(x[0], a, b, c).unsqueeze(0) if len(x) == 1 else _advance_batch(x, a, b, c)
    return x


def _compute_dtype(matrices: Tensor, precision: str) -> torch.dtype:
    coarse = precision == "bfloat16" or (precision == "auto" and matrices.device.type != "cpu")
    return torch.bfloat16 if matrices.dtype == torch.float32 and coarse else matrices.dtype


def _advance(x: Tensor, a: float, b: float, c: float) -> Tensor:
    gram = torch.mm(x, x.T)
    return torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


def _advance_batch(x: Tensor, a: float, b: float, c: float) -> Tensor:
    gram = torch.bmm(x, x.mT)
    return torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


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

    def update(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group
    ) -> None:
        momenta = buffers(states, "momentum", parameters)
        directions = ema_momentum(momenta, gradients, group["momentum"], nesterov=group["nesterov"])
        decay(parameters, group)
        for positions, steps in orthogonal_directions(directions, group):
            rows, columns = steps.shape[-2:]
            factor = -group["lr"] * update_scale(rows, columns, group["scale"])
            torch._foreach_add_([parameters[i] for i in positions], list(steps.unbind()), alpha=factor)
