"""Products of rows with a stack of matrices, one matrix for each group of consecutive rows.

`torch.nn.functional.grouped_mm` where it serves, else a loop over the groups, which is the reference, too.
Groups may be empty. The products are operators of their own, so that torch.compile takes them as they are: it
knows grouped_mm in bfloat16 only, and no loop whose slices depend on values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.model.gradients.weight_gradient import add_product

ALIGNMENT = 16
"""Rows that grouped_mm takes are multiples of this, bytes."""


class Groups(NamedTuple):
    """The rows of a micro-batch in order of their experts: a row is a token at one of its experts."""

    order: Tensor
    """Each row's position in `chosen`, flattened: int64 `(tokens * k,)`. Its token is that `// k`."""
    places: Tensor
    """For each position in `chosen`, flattened, its row: int64 `(tokens * k,)`."""
    ends: Tensor
    """Number of rows up to and with each expert's, int32 `(E,)`."""
    load: Tensor
    """Number of rows of each expert, int64 `(E,)`."""


def group(chosen: Tensor, experts: int) -> Groups:
    """Order rows by expert, and within an expert by token.

    An operator of its own, whose result is kept for the backward, compiled or not: it sorts.

    Args:
        chosen: experts of each token, int64 `(tokens, k)`.
        experts: number of experts.
    """
    return Groups(*order_rows(chosen, experts))


@torch.library.custom_op("asyncpp::order_rows", mutates_args=())
def order_rows(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Groups`, as an operator that torch's compiler takes whole."""
    flat = chosen.flatten()
    # A radix sort goes over the bytes of its keys one after the other.
    order = flat.to(torch.int16 if experts <= 2**15 else flat.dtype).argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    load = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    return order, places, load.cumsum(0).to(torch.int32), load


@order_rows.register_fake
def _(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, of_experts = chosen.new_empty(chosen.numel()), chosen.new_empty(experts)
    return rows, torch.empty_like(rows), of_experts.to(torch.int32), of_experts


def is_grouped(dtype: torch.dtype, *widths: int) -> bool:
    """Whether grouped_mm takes rows of these widths: not of float64, and only aligned ones."""
    return dtype in (torch.float32, torch.bfloat16) and all(
        width * dtype.itemsize % ALIGNMENT == 0 for width in widths
    )


@torch.library.custom_op("asyncpp::times_stack", mutates_args=())
def times_stack(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row with its group's matrix.

    Args:
        rows: `(R, inner)`, contiguous.
        stack: `(E, inner, outer)`; a transposed view will do.
        ends: see `Groups`.

    Returns:
        `(R, outer)`.
    """
    if is_grouped(rows.dtype, *stack.shape[1:]):
        return F.grouped_mm(rows, stack, offs=ends)
    out = rows.new_empty(len(rows), stack.shape[-1])
    for expert, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        torch.mm(rows[first:end], stack[expert], out=out[first:end])
    return out


@times_stack.register_fake
def _(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], stack.shape[-1])


@torch.library.custom_op("asyncpp::stack_gradient", mutates_args=())
def stack_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Gradient of a stack of matrices `(E, outer, inner)` that rows were multiplied with.

    Args:
        gradient: of the products, `(R, outer)`, contiguous.
        rows: `(R, inner)`, contiguous.
        ends: see `Groups`.
    """
    if is_grouped(rows.dtype, gradient.shape[-1], rows.shape[-1]):
        return F.grouped_mm(gradient.t(), rows, offs=ends)
    out = rows.new_empty(len(ends), gradient.shape[-1], rows.shape[-1])
    for expert, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        torch.mm(gradient[first:end].t(), rows[first:end], out=out[expert])
    return out


@stack_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[-1], rows.shape[-1])


@torch.library.custom_op("asyncpp::read_again", mutates_args=())
def read_again(kept: Tensor, gradient: Tensor) -> Tensor:
    """A copy of a tensor that a forward kept, made in the backward, since it takes a gradient.

    The compiler takes what a backward computes from kept tensors alone for what the forward computed from
    them, and keeps that result as well, where a product reads it: a row for each token and expert.
    """
    return kept.clone()


@read_again.register_fake
def _(kept: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(kept)


def computed_again(kept: Tensor, gradient: Tensor) -> Tensor:
    """A tensor that a forward kept, for values that the backward of `gradient` computes a second time."""
    return cast(Tensor, read_again(kept, gradient)) if torch.compiler.is_compiling() else kept


def add_stack_gradient(total: Tensor, gradient: Tensor, rows: Tensor, ends: Tensor) -> None:
    """Add the gradient of a stack of matrices to `total` `(E, outer, inner)`.

    On a CPU as exact as that of one matrix. grouped_mm has no output wider than its factors, and a loop would
    have a GPU wait for the host: there the gradient is rounded to their type, and added without a copy.

    Args:
        total: of the factors' type or float32.
        gradient: see `stack_gradient`.
        rows: likewise.
        ends: likewise.
    """
    if total.is_cuda or total.dtype == rows.dtype:
        total.add_(stack_gradient(gradient, rows, ends))
        return
    for expert, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        add_product(total[expert], gradient[first:end], rows[first:end])
