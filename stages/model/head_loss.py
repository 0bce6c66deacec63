"""The loss behind the head's matrix: of whole logits, or in chunks (`stages.shape.head`).

Chunks take the gradients in the forward, as Liger's kernels do (arXiv 2410.10989, section 3.2) and torch's
`linear_cross_entropy` since 2.13. That rounds the loss and the sum over the chunks to the type of the input;
here both are in at least float32, and the gradient of the matrix can be deferred.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.model.gradients.split_backward import DeferredGradients, Linear, deferred_now
from stages.model.gradients.weight_gradient import add_product
from stages.shape.head import chunk_rows


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, computed in at least float32.

    Args:
        logits: `(batch, context, vocab_size)`.
        targets: `(batch, context)` token ids.
    """
    return F.cross_entropy(_wide(logits).flatten(0, 1), targets.flatten())


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(logits / c), computed in at least float32 (arXiv 2408.00118, section 2); logits without a c."""
    return logits if softcap is None else (softcap * (_wide(logits) / softcap).tanh()).to(logits.dtype)


def head_loss(
    head: Linear, x: Tensor, targets: Tensor, *, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """`next_token_loss(capped(head(x)), targets)`, in chunks where the logits are large.

    Args:
        head: the matrix.
        x: its input `(batch, context, width)`.
        targets: `(batch, context)` token ids.
        softcap: see `capped`.
        z_loss: weight of the mean of log(sum exp logits)^2 (arXiv 2204.02311, section 5), which is in the
            gradients and not in the value.
    """
    vocabulary, width = head.weight.shape
    wide = max(4, x.dtype.itemsize)
    rows = chunk_rows(
        tokens=targets.numel(),
        width=width,
        vocabulary=vocabulary,
        wide=wide,
        on_gpu=x.is_cuda,
        always=softcap is not None or z_loss > 0,
    )
    if rows is None:
        return next_token_loss(head(x), targets)
    loss = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, 1),
        head.weight,
        targets.flatten(),
        rows,
        torch.is_grad_enabled(),
        deferred_now(),
        softcap,
        z_loss,
    )
    return cast(Tensor, loss)


class _ChunkedLoss(torch.autograd.Function):
    """Mean loss from input `(tokens, width)`, matrix `(vocabulary, width)` and targets `(tokens)`."""

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        with_gradients: bool,
        deferred: DeferredGradients | None,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        wide = torch.promote_types(given.dtype, torch.float32)
        total = given.new_zeros((), dtype=wide)
        of_given = torch.empty_like(given) if with_gradients else given
        of_weight = torch.zeros_like(weight, dtype=wide) if with_gradients else weight
        for start in range(0, len(given), rows):
            part = slice(start, start + rows)
            logits = _wide(F.linear(given[part], weight))
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
            log_probabilities = F.log_softmax(logits, dim=-1)
            total += F.nll_loss(log_probabilities, targets[part], reduction="sum")
            if not with_gradients:
                continue
            log_sums = logits[:, :1] - log_probabilities[:, :1] if z_loss else None
            if softcap is None:
                del logits
            of_logits = log_probabilities.exp_()
            if log_sums is not None:
                of_logits *= 1 + 2 * z_loss * log_sums
            of_logits[torch.arange(len(of_logits), device=given.device), targets[part]] -= 1
            if softcap is not None:
                of_logits *= 1 - logits.div_(softcap).square_()
                del logits
            if given.dtype == wide:
                of_weight.addmm_(of_logits.t(), given[part])
            else:
                # Scaled while it is still wide: the factor of the backward is then mostly a power of two.
                of_logits = of_logits.mul_(1 / len(given)).to(given.dtype)
                add_product(of_weight, of_logits, given[part])
            torch.mm(of_logits, weight, out=of_given[part])
            del log_probabilities, of_logits  # before the next chunk makes its own
        if with_gradients:
            ctx.save_for_backward(of_given, of_weight)
        ctx.share = 1 / len(given) if given.dtype == wide else 1.0
        ctx.deferred = deferred
        # A tensor that is saved comes back as another one, whose grad would be lost.
        ctx.parameter = weight
        return total / len(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_given, of_weight = ctx.saved_tensors
        scale = gradient * ctx.share
        scaled = (_wide(of_given) * scale).to(of_given.dtype)
        if ctx.deferred is None:
            return scaled, of_weight.mul_(scale), None, None, None, None, None, None
        ctx.deferred.leave([ctx.parameter], partial(_add_scaled, scale=scale), of_weight)
        return scaled, None, None, None, None, None, None, None


def _add_scaled(total: Tensor, gradient: Tensor, *, scale: Tensor) -> None:
    total.add_(gradient.mul_(scale))  # used once, so in place


def _wide(values: Tensor) -> Tensor:
    """In at least float32."""
    return values if values.dtype == torch.float64 else values.float()
