"""DC-ASGD: correct a delayed gradient to first order for how far the weights have moved since.

Zheng et al., "Asynchronous stochastic gradient descent with delay compensation" (arXiv 1609.08326). The
Hessian is approximated by the diagonal of g g^T. Included for comparison: on language models it was found to
recover next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def compensate(
    gradients: Sequence[Tensor], *, current: Sequence[Tensor], computed_at: Sequence[Tensor], strength: float
) -> None:
    """Add strength g * g * (current - computed_at) to each gradient g, in place.

    Args:
        gradients: Computed at the delayed weights; before clipping.
        current: The newest weights, which the update will be applied to.
        computed_at: The weights that the gradients were computed at, which a stashing schedule keeps.
        strength: lambda of the paper.
    """
    moved = [
        now.to(gradient.dtype, copy=True).sub_(then)
        for now, then, gradient in zip(current, computed_at, gradients, strict=True)
    ]
    torch._foreach_mul_(moved, list(gradients))
    torch._foreach_mul_(moved, list(gradients))
    torch._foreach_add_(list(gradients), moved, alpha=strength)
