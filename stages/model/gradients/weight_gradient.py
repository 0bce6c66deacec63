"""The gradients of matrices and of the embedding, added to the buffers that gather them.

In bfloat16 runs these are float32. Autograd rounds each gradient to bfloat16, copies it to float32 and adds
the copy; here sums are in float32 from the start, and a matrix's gradient is no tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor


def is_added_in_backward(weight: Tensor) -> bool:
    """Whether a backward adds the gradient of `weight` to its `grad` itself, since that has a wider type.

    Its `grad` may be made in the backward (`stages.weights.sharded_weights`), but not the type of it.

    Not within what is compiled: which buffer is the current one is known in backward only. There, as where
    the type is the same, autograd adds it, or it is added outside (`stages.model.runner`).
    """
    if torch.compiler.is_compiling():
        return False
    return weight.is_leaf and weight.requires_grad and weight.grad_dtype not in (None, weight.dtype)


def add_product(total: Tensor, gradient: Tensor, given: Tensor) -> None:
    """Add a matrix's gradient to `total`; it is not rounded to the type of its factors.

    Args:
        total: `(outputs, inputs)`, of the factors' type or float32.
        gradient: of the layer's output, `(rows, outputs)`.
        given: the layer's input `(rows, inputs)`.
    """
    if total.dtype == gradient.dtype:
        total.add_(gradient.t() @ given)  # in two steps, as autograd does: the same bits
    elif total.is_cuda:
        torch.addmm(total, gradient.t(), given, out_dtype=total.dtype, out=total)
    else:
        # No product of torch's on a CPU has an output wider than its factors.
        with _factors_are_bfloat16():
            total.addmm_(gradient.t().to(total.dtype), given.to(total.dtype))


def add_rows(total: Tensor, gradient: Tensor, tokens: Tensor) -> None:
    """Add an embedding's gradient to `total`; rows of one token are added up in its type.

    Args:
        total: `(tokens of the vocabulary, width)`.
        gradient: of the embedded tokens, `(rows, width)`.
        tokens: ids, int64 `(rows,)`.
    """
    rows = gradient.to(total.dtype)
    if total.is_cuda:
        # index_add_ adds the rows of a token in any order there.
        rows, tokens = sums_by_token(rows, tokens)
    total.index_add_(0, tokens, rows)


def sums_by_token(rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of the rows of each token, in a fixed order, and the tokens; as many as there are rows, and
    what is left over are zeros for token 0. Needs no table of the vocabulary, and no value on the host.

    Args:
        rows: `(rows, width)`.
        tokens: ids, int64 `(rows,)`.
    """
    ordered, order = tokens.sort(stable=True)
    is_first = torch.ones_like(ordered)
    is_first[1:] = ordered[1:] != ordered[:-1]
    numbers_in_order = is_first.cumsum(0) - 1
    numbers = torch.empty_like(tokens).scatter_(0, order, numbers_in_order)
    sums = torch.ops.aten.embedding_dense_backward(rows, numbers, len(rows), -1, False)
    return sums, torch.zeros_like(tokens).scatter_(0, numbers_in_order, ordered)


@contextmanager
def _factors_are_bfloat16() -> Iterator[None]:
    """In this context factors in float32 hold bfloat16 values: a CPU that multiplies these with float32
    sums may do so. Nothing is rounded by it, and it takes half the time."""
    matmul = cast(Any, torch.backends.mkldnn).matmul  # torch's annotations lack it
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
