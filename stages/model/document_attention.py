"""Causal attention within documents: no token attends to another document of its sequence.

On a GPU in bfloat16 by torch's flash kernel for sequences of various lengths; otherwise document by document.
What is masked is not computed. The number of documents differs from micro-batch to micro-batch, so this is an
operator of its own, which torch.compile takes as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_HEAD_DIM = 256
"""The widest head that the flash kernel takes."""
_FLASH_ALIGNMENT = 8
"""Heads that it takes have a multiple of so many values."""

aten = torch.ops.aten


@torch.library.custom_op("asyncpp::document_attention", mutates_args=())
def document_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend within each document.

    Args:
        query: `(batch, heads, context, head_dim)`.
        key: `(batch, key/value heads, context, head_dim)`; their number divides that of the heads.
        value: likewise.
        ends: see `stages.data.documents.Documents`.
        bounds: likewise.
        scale: factor of the products of queries and keys.

    Returns:
        What attention returns, shaped as `query`, and the logarithm of each softmax's sum,
        `(heads, batch * context)`.
    """
    out, sums = _results(query)
    if _takes_flash(query):
        count, longest = _counted(bounds, query)
        flat, sums, *_ = aten._flash_attention_forward(
            *(_aligned(_flat(part)) for part in (query, key, value)),
            ends[: count + 1],
            ends[: count + 1],
            longest,
            longest,
            0.0,
            True,
            False,
            scale=scale,
        )
        return _unflat(flat, query), sums
    groups = query.shape[1] // key.shape[1]
    for sequence, place, flat_place in _documents(bounds, query):
        q, k, v = query[sequence, :, place], key[sequence, :, place], value[sequence, :, place]
        attended, added = _attend(q, _spread(k, groups), _spread(v, groups), scale=scale)
        out[sequence, :, place] = attended
        sums[:, flat_place] = added[0]
    return out, sums


@document_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _results(query)


@torch.library.custom_op("asyncpp::document_attention_gradients", mutates_args=())
def document_attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    ends: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `query`, `key` and `value`, from that of `out`; `out` and `sums` are what
    `document_attention` has returned."""
    if _takes_flash(query):
        count, longest = _counted(bounds, query)
        gradients = aten._flash_attention_backward(
            *(_aligned(_flat(part)) for part in (gradient, query, key, value, out)),
            sums,
            ends[: count + 1],
            ends[: count + 1],
            longest,
            longest,
            0.0,
            True,
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # random state of the dropout, unused
            torch.empty(0, device=query.device),
            scale=scale,
        )
        of_query, of_key, of_value = (
            _unflat(flat, like) for flat, like in zip(gradients, (query, key, value), strict=True)
        )
        return of_query, of_key, of_value
    of_query, of_key, of_value = (_by_token(part) for part in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for sequence, place, flat_place in _documents(bounds, query):
        g, q, k, v, o = (part[sequence, :, place] for part in (gradient, query, key, value, out))
        k, v = _spread(k, groups), _spread(v, groups)
        q_gradient, k_gradient, v_gradient = _attend_backward(
            g, q, k, v, o, sums[None, :, flat_place], scale=scale
        )
        of_query[sequence, :, place] = q_gradient
        of_key[sequence, :, place] = _gathered(k_gradient, groups)
        of_value[sequence, :, place] = _gathered(v_gradient, groups)
    return of_query, of_key, of_value


@document_attention_gradients.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(query), _by_token(key), _by_token(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # the sums have none: no zeros are made for them


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
    query, key, value, ends, bounds, out, sums = ctx.saved_tensors
    gradients = document_attention_gradients(gradient, query, key, value, out, sums, ends, bounds, ctx.scale)
    return *gradients, None, None, None


document_attention.register_autograd(_backward, setup_context=_setup)


def _takes_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype == torch.bfloat16 and query.shape[-1] <= FLASH_HEAD_DIM


def _has_cpu_kernel(query: Tensor) -> bool:
    return not query.is_cuda


def _by_token(like: Tensor) -> Tensor:
    """Room for `(batch, heads, context, head_dim)`, laid out by token."""
    batch, heads, context, width = like.shape
    return like.new_empty(batch, context, heads, width).transpose(1, 2)


def _results(query: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, context, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return _by_token(query), query.new_empty(heads, batch * context, dtype=wide)


def _flat(heads: Tensor) -> Tensor:
    """`(batch * context, heads, head_dim)`."""
    return heads.transpose(1, 2).flatten(0, 1)


def _unflat(flat: Tensor, like: Tensor) -> Tensor:
    batch, heads, context, width = like.shape
    return flat.view(batch, context, heads, -1)[..., :width].transpose(1, 2)


def _aligned(heads: Tensor) -> Tensor:
    missing = -heads.shape[-1] % _FLASH_ALIGNMENT
    return F.pad(heads, (0, missing)) if missing else heads


def read_bounds(bounds: Tensor, query: Tensor) -> list[int]:
    """Number of tokens before each document of `query`, and before the last one's end, from host memory."""
    return list(bounds[: int(bounds[-1]) + 1].tolist())


def _counted(bounds: Tensor, query: Tensor) -> tuple[int, int]:
    """Number of documents, and length of the longest."""
    lengths = [end - start for start, end in pairwise(read_bounds(bounds, query))]
    return len(lengths), max(lengths)


def _documents(bounds: Tensor, query: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """For each document: its sequence, its place there, and its place among all tokens."""
    context = query.shape[2]
    for start, end in pairwise(read_bounds(bounds, query)):
        sequence, first = divmod(start, context)
        yield slice(sequence, sequence + 1), slice(first, first + end - start), slice(start, end)


def _spread(heads: Tensor, groups: int) -> Tensor:
    """A copy of each key/value head for every head of its group."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _gathered(gradient: Tensor, groups: int) -> Tensor:
    return (
        gradient if groups == 1 else gradient.view(len(gradient), -1, groups, *gradient.shape[2:]).sum(dim=2)
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of one document, and the logarithms of the sums."""
    if _has_cpu_kernel(query):
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scale
        )
        return out, sums
    scores = _scores(query[0], key[0], scale=scale)
    return torch.bmm(scores.softmax(dim=-1).to(query.dtype), value[0])[None], scores.logsumexp(dim=-1)[None]


def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_cpu_kernel(query):
        of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, sums, 0.0, True, scale=scale
        )
        return of_query, of_key, of_value
    gradient, query, key, value, out = (part[0] for part in (gradient, query, key, value, out))
    shares = (_scores(query, key, scale=scale) - sums[0, ..., None]).exp()
    of_shares = torch.bmm(gradient, value.mT).to(shares.dtype)
    of_scores = shares * (of_shares - (gradient * out).sum(dim=-1, keepdim=True, dtype=shares.dtype))
    of_scores = (of_scores * scale).to(query.dtype)
    of_query, of_key = torch.bmm(of_scores, key), torch.bmm(of_scores.mT, query)
    return of_query[None], of_key[None], torch.bmm(shares.to(query.dtype).mT, gradient)[None]


def _scores(query: Tensor, key: Tensor, *, scale: float) -> Tensor:
    """`(heads, tokens, tokens)` in at least float32; minus infinity where a key is later than its query."""
    scores = torch.bmm(query, key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf"))
