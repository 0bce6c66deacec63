"""Basis rotation: Adam in a rotated basis, which aligns its entry-wise scaling with the curvature.

Jung, Shin and Lee (arXiv 2602.03515), Algorithms 1 and 2. A delayed gradient makes Adam oscillate where the
two are badly aligned. The bases come from the second moment of the gradient (then it is close to SOAP) or
from the momentum (then close to full-rank GaLore), on both sides of a matrix or on its smaller one.

Differences from SOAP (`optimizers.rules.soap`): the first gradient already makes a step, the bases of a step
include that step's gradient (they are refreshed before the step, not after it), and refreshes count from the
first gradient.

Differences from the authors' code, in points that the paper leaves open:

- refreshes come at steps 1, 1 + f, 1 + 2f, ... here and at 1, f, 2f, ... there;
- eps is added after the bias correction of the second moment here, as in AdamW, and before it there, which
  makes it larger by 1 / sqrt(1 - beta2^t);
- from the first moment: U and then V, from the new U, here, as in the paper's Algorithm 2, V from the old U
  there; there the columns are sorted by their norm first, and N with them; and with `geometry` unilateral the
  basis is that of QR(M) there, and one step of power iteration on M M^T (or M^T M) from the old basis here.

From the second moment both compute the same bases from the same refreshes.
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
    States,
    Tensors,
    as_batch,
    buffers,
    by_shape,
    count_step,
    decay,
)
from optimizers.rules.soap import (
    Basis,
    accumulate,
    complete,
    eigenbasis,
    greatest_rank,
    in_range,
    orthonormal,
    refresh,
    reorder,
    rotate,
    rotate_back,
    stacked,
    store,
)


def sides(rows: int, columns: int, geometry: str) -> tuple[str, ...]:
    """Which sides of a matrix are rotated: both if `bilateral`, the smaller one if `unilateral`."""
    if geometry == "bilateral":
        return ("left", "right")
    return ("left",) if rows < columns else ("right",)


class BasisRotation(ListOptimizer):
    """Adam in the bases U, V, which are refreshed every `refresh_interval` steps:

        M <- beta1 M + (1 - beta1) G
        N <- beta2 N + (1 - beta2) (U^T G V)^2
        W <- (1 - lr weight_decay) W - lr U (U^T M' V / (sqrt(N') + eps)) V^T

    where ' is Adam's bias correction. With `source` second-moment, U comes from L = EMA(G G^T) and V from
    R = EMA(G^T G), by a full decomposition in the first step and one step of power iteration later; the rows
    and columns of N follow the sorting of the bases. With `source` first-moment, U and V are the singular
    vectors of M, later those of QR(M V) and QR(M^T U).

    M is kept rotated, as U^T M V, and rotated again when the bases are refreshed, not in every step. Keeps M
    and N, U and V, and for the second moment L and R: 2 rows columns + k (rows^2 + columns^2) values per
    matrix with k = 2, or 1 for the first moment; a side that is not rotated has none.

    Group settings: `lr`, `weight_decay`, `beta1`, `beta2`, `eps`, `source`, `geometry`, `refresh_interval`.
    """

    def update(self, parameters: Tensors, gradients: Tensors, states: States, group: Group) -> None:
        step = count_step(states)
        correction1, correction2 = 1 - group["beta1"] ** step, 1 - group["beta2"] ** step
        decay(parameters, group)
        for positions in by_shape(parameters):
            chosen = [states[i] for i in positions]
            batch = as_batch([gradients[i] for i in positions])  # (matrices, rows, columns)
            like = list(batch.unbind())
            rows, columns = batch.shape[-2:]
            rotated = sides(rows, columns, group["geometry"])
            momenta, squares = buffers(chosen, "rotated_first", like), buffers(chosen, "square", like)
            if group["source"] == "second-moment":
                accumulate(batch, chosen, rotated, group["beta2"])
            refreshing = (step - 1) % group["refresh_interval"] == 0
            if refreshing:
                # M in the model's axes.
                original = rotate_back(as_batch(momenta), *_bases(chosen)).lerp(batch, 1 - group["beta1"])
                _REFRESH[group["source"]](chosen, rotated, original, step)
                store(chosen, "rotated_first", rotate(original, *_bases(chosen)))
            turned = rotate(batch, *_bases(chosen))  # U^T G V
            if not refreshing:
                torch._foreach_lerp_(momenta, list(turned.unbind()), 1 - group["beta1"])
            torch._foreach_lerp_(squares, list(turned.square().unbind()), 1 - group["beta2"])
            denominator = as_batch(squares).div(correction2).sqrt_().add_(group["eps"])
            steps = rotate_back(as_batch(momenta) / denominator, *_bases(chosen))
            torch._foreach_add_(
                [parameters[i] for i in positions], list(steps.unbind()), alpha=-group["lr"] / correction1
            )


def _bases(states: States) -> tuple[Basis, Basis]:
    """U `(matrices, rows, rows)`, V `(matrices, columns, columns)`; None for a side that is not rotated."""
    left, right = (
        stacked(states, f"{side}_basis") if f"{side}_basis" in states[0] else None
        for side in ("left", "right")
    )
    return left, right


def _refresh_from_second_moment(
    states: States, rotated: tuple[str, ...], momenta: Tensor, gradients: int
) -> None:
    """Refresh the bases from L and R, which have seen so many gradients; N follows the order of its axes."""
    first_time = f"{rotated[0]}_basis" not in states[0]
    for side in rotated:
        if first_time:
            store(states, f"{side}_basis", eigenbasis(stacked(states, side)))
            continue
        rank = greatest_rank(states, side, gradients)
        basis, order = refresh(stacked(states, side), stacked(states, f"{side}_basis"), rank=rank)
        store(states, f"{side}_basis", basis)
        axis = -2 if side == "left" else -1
        store(states, "square", reorder(stacked(states, "square"), order, axis))


def _refresh_from_first_moment(
    states: States, rotated: tuple[str, ...], momenta: Tensor, gradients: int
) -> None:
    """Refresh the bases from M, `momenta` of shape `(matrices, rows, columns)`: V from the new U."""
    left, right = _bases(states)
    if left is None and right is None:
        u, values, vh = torch.linalg.svd(momenta, full_matrices=True)
        for side, basis in (("left", u), ("right", vh.mT)):
            if side in rotated:
                store(states, f"{side}_basis", complete(basis, in_range(values)))
        return
    if left is not None:
        images = momenta.mT @ left if right is None else right
        left = _advance(torch.bmm(momenta, images), left)
        store(states, "left_basis", left)
    if right is not None:
        images = momenta @ right if left is None else left
        store(states, "right_basis", _advance(torch.bmm(momenta.mT, images), right))


def _advance(images: Tensor, basis: Tensor) -> Tensor:
    """Orthonormalize `images` (count, n, k) into a full basis of n columns.

    Where k < n, or an image is zero, the columns of the present basis complete it, so that the part of the
    space that the momentum does not reach keeps its axes as far as possible.
    """
    size, images = basis.shape[-1], images[..., : basis.shape[-1]]
    reached = F.pad(in_range(images.square().sum(-2)), (0, size - images.shape[-1]))
    images = F.pad(images, (0, size - images.shape[-1])).where(reached.unsqueeze(-2), basis)
    # Those that are reached come first: the others give way to them.
    order = reached.byte().argsort(dim=-1, descending=True, stable=True)
    columns = order.unsqueeze(-2).expand_as(images)
    return torch.empty_like(images).scatter_(-1, columns, orthonormal(images.gather(-1, columns)))


_REFRESH = {"second-moment": _refresh_from_second_moment, "first-moment": _refresh_from_first_moment}


def stage_aware_intervals(interval: int, delays: Sequence[float]) -> list[int]:
    """Refresh intervals by stage: shorter for a larger delay, with the same number of refreshes in total.

    Refresh frequencies are proportional to 1 + delay, with the mean frequency of `interval`. The paper
    gives the idea (early stages more often); the rule is asyncpp's.

    Args:
        interval: Steps between refreshes if all stages had the same.
        delays: Each stage's delay in updates.

    Returns:
        Steps between refreshes of each stage, at least 1.
    """
    mean = sum(1 + delay for delay in delays) / len(delays)
    return [max(1, math.floor(interval * mean / (1 + delay) + 0.5)) for delay in delays]
