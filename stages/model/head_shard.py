"""A shard of the head (vocabulary parallelism, arXiv 2411.05288): some rows of its matrix, on one rank.

With X the hidden states `(tokens, width)`, W_k the rows of shard k, Y_k = X W_k^T its logits, P_k their
softmax within the shard, e_k the logarithm of their sum of exponentials and G_k the targets, one-hot, in it:

- a shard gives A_k = P_k W_k, B_k = G_k W_k, e_k and the targets' logits (S);
- with e = log sum exp e_k, the loss is the mean of e - the target's logit, and the gradient of X is
  sum_k (exp(e_k - e) A_k - B_k) / tokens;
- the gradient of W_k is (exp(e_k - e) P_k - G_k)^T X / tokens: it needs e of all shards, and can wait (T).

Where the head is tied to the embedding, a shard is one of the embedding's matrix, too: `embed` (E) and
`leave_embedded` (G).

Logits, softmax and sums are computed in at least float32, a few rows of tokens at a time. In bfloat16 P_k is
kept and sent without the targets: near 1 its rounding is as large as what it is short of 1. Their terms,
exp(logit - e) - 1, are computed from the logits in float32, in the place of the -1 of G_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.model.gradients.split_backward import DeferredGradients
from stages.model.gradients.weight_gradient import add_rows
from stages.shape.head import rows_name, shard_chunk


class ShardPass(NamedTuple):
    """What S keeps for T."""

    hidden: Tensor
    """`(tokens, width)`"""
    targets: Tensor
    """`(tokens)`"""
    probabilities: Tensor
    """Within the shard, `(tokens, rows)`."""
    log_sums: Tensor
    """Within the shard, `(tokens)`, in at least float32."""
    target_logits: Tensor
    """Logits of the targets in the shard, `(tokens)`, as wide as `log_sums`; 0 for other targets."""


class MergedHead(NamedTuple):
    """What the stage before the head computes from the parts of all shards."""

    loss: Tensor
    """Mean over the tokens, in nats."""
    gradient: Tensor
    """Gradient of the hidden states."""
    sums: Tensor
    """Message to the shards: the logarithm of each token's sum over the whole vocabulary."""


class HeadShard(nn.Module):
    """Some rows of the head's matrix.

    Args:
        width: of the model.
        rows: of the matrix.
    """

    def __init__(self, width: int, rows: range) -> None:
        super().__init__()
        self.rows = rows
        self._name = rows_name("weight", rows)
        self.register_parameter(self._name, nn.Parameter(torch.empty(len(rows), width)))

    @property
    def weight(self) -> nn.Parameter:
        """The rows, `(rows, width)`."""
        return self._parameters[self._name]  # type: ignore[return-value]

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The shard's part of the loss, as `run` gives it, without gradients."""
        return self.run(hidden, targets, with_gradients=False)[0]

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """E: the rows of the tokens `(batch, context)` that are in the shard, zeros for the others. The
        sum over all shards is exact.
        """
        local, inside = self._local(tokens)
        return F.embedding(local, self.weight).mul_(inside[..., None])

    def leave_embedded(self, gradients: DeferredGradients, tokens: Tensor, gradient: Tensor) -> None:
        """G: leave the gradient of the rows as an embedding to `gradients`.

        Args:
            gradients: computes it.
            tokens: of `embed`.
            gradient: of the sum over the shards, `(batch, context, width)`.
        """
        local, inside = self._local(tokens.flatten())
        gradients.leave([self.weight], add_rows, gradient.flatten(0, -2) * inside[:, None], local)

    @torch.no_grad()
    def run(
        self, hidden: Tensor, targets: Tensor, *, with_gradients: bool = True
    ) -> tuple[Tensor, ShardPass | None]:
        """S: the part to send, and what T needs.

        Args:
            hidden: input of the head, `(batch, context, width)`.
            targets: token ids `(batch, context)`.
            with_gradients: whether the part has terms of the input's gradient; if not, they are 0, and
                nothing is kept.
        """
        weight, given, wanted = self.weight, hidden.flatten(0, 1), targets.flatten()
        tokens, width = given.shape
        wide = _wide_type(given)
        local, inside = self._local(wanted)  # (tokens), (tokens)
        numbers = given.new_empty((tokens, 2), dtype=wide)  # e_k, and the logit of the target
        part = given.new_zeros((tokens, 2 * width + 2 * wide.itemsize // given.itemsize))  # A_k, B_k, numbers
        kept = given.new_empty((tokens, len(weight))) if with_gradients else None  # P_k
        for rows in _chunks(tokens, len(weight), wide=wide, on_gpu=given.is_cuda):
            logits = F.linear(given[rows], weight).to(wide)  # (rows, rows of the shard)
            numbers[rows, 1] = logits.gather(1, local[rows, None])[:, 0].where(inside[rows], 0.0)
            top = logits.amax(dim=1, keepdim=True)  # (rows, 1)
            sums = logits.sub_(top).exp_().sum(dim=1, keepdim=True)  # (rows, 1)
            numbers[rows, 0] = top.add_(sums.log())[:, 0]
            if kept is not None:
                logits.div_(sums)
                if given.dtype != wide:
                    # In bfloat16 without the targets.
                    logits[torch.arange(len(logits), device=given.device), local[rows]] *= ~inside[rows]
                kept[rows] = logits
                part[rows, :width] = kept[rows] @ weight
            del logits
        if kept is not None:
            part[:, width : 2 * width] = F.embedding(local, weight) * inside[:, None]
        part[:, 2 * width :] = numbers.view(given.dtype)
        sent = part.view(*hidden.shape[:2], -1)
        if kept is None:
            return sent, None
        return sent, ShardPass(given, wanted, kept, *numbers.t().clone())

    @torch.no_grad()
    def gradient_factors(self, kept: ShardPass, sums: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """T: the gradient of the logits `(tokens, rows)` and the hidden states, whose product is that of the
        rows; the first is in the memory of the probabilities.

        Args:
            kept: of S.
            sums: `MergedHead.sums`.
            scale: factor of the mean loss.
        """
        factors = kept.probabilities  # (tokens, rows)
        local, inside = self._local(kept.targets)
        whole = sums.flatten(0, 1).view(kept.log_sums.dtype)[:, 0]  # e, (tokens)
        tokens, shares = len(factors), (kept.log_sums - whole).exp_()  # exp(e_k - e), (tokens)
        of_target = _of_target(kept.target_logits, whole, narrow=factors.dtype != shares.dtype)
        of_target = of_target.where(inside, 0.0)
        for rows in _chunks(tokens, factors.shape[1], wide=shares.dtype, on_gpu=factors.is_cuda):
            of_logits = factors[rows].to(shares.dtype) * shares[rows, None]
            numbers = torch.arange(len(of_logits), device=factors.device)
            of_logits[numbers, local[rows]] += of_target[rows]
            factors[rows] = of_logits.mul_(scale / tokens)
        return factors, kept.hidden

    def _local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each target within the shard, and whether it is in it; 0 where it is not."""
        local = targets - self.rows.start
        inside = (local >= 0) & (local < len(self.rows))
        return local.where(inside, 0), inside


@torch.no_grad()
def merge_parts(parts: Sequence[Tensor], *, scale: float) -> MergedHead:
    """The loss, and the gradient of the head's input, from the parts of all shards in their order.

    Args:
        parts: of `HeadShard.run`, `(batch, context, ...)`.
        scale: factor of the mean loss.
    """
    flat = [part.flatten(0, 1) for part in parts]
    wide, tokens = _wide_type(flat[0]), len(flat[0])
    width = flat[0].shape[1] // 2 - wide.itemsize // flat[0].itemsize
    numbers = torch.stack([part[:, 2 * width :].contiguous().view(wide) for part in flat])
    log_sums = numbers[:, :, 0]  # e_k, (shards, tokens)
    whole = torch.logsumexp(log_sums, dim=0)  # e, (tokens)
    target_logits = numbers[:, :, 1].sum(dim=0)  # of all shards but the target's they are 0
    loss = (whole - target_logits).mean()
    of_target = _of_target(target_logits, whole, narrow=flat[0].dtype != wide)[:, None]
    shares = (log_sums - whole).exp_()  # (shards, tokens)
    gradient = flat[0].new_zeros((tokens, width), dtype=wide)
    for part, share in zip(flat, shares, strict=True):
        gradient.addcmul_(part[:, :width].to(wide), share[:, None])
        gradient.addcmul_(part[:, width : 2 * width].to(wide), of_target)
    shape = parts[0].shape[:2]
    return MergedHead(
        loss,
        gradient.mul_(scale / tokens).to(flat[0].dtype).view(*shape, width),
        whole[:, None].view(flat[0].dtype).view(*shape, -1),
    )


def _of_target(logits: Tensor, log_sums: Tensor, *, narrow: bool) -> Tensor:
    """What is added to the kept probabilities of the targets: they are there but in a narrow type."""
    return (logits - log_sums).expm1_() if narrow else torch.full_like(log_sums, -1.0)


def _wide_type(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _chunks(tokens: int, rows: int, *, wide: torch.dtype, on_gpu: bool) -> Iterator[slice]:
    """Tokens of which the logits are computed at once."""
    size = shard_chunk(rows=rows, wide=wide.itemsize, on_gpu=on_gpu)
    return (slice(start, start + size) for start in range(0, tokens, size))
