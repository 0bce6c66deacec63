"""Layers that blocks are composed of: RMSNorm, attention, SwiGLU, and a block of them."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.config.run_config import ModelConfig
from stages.data.documents import Documents
from stages.model.document_attention import document_attention
from stages.model.gradients.selective import cheap
from stages.model.gradients.split_backward import Linear
from stages.model.gradients.weight_gradient import add_rows, is_added_in_backward
from stages.shape.parametrization import attention_scale, residual_multiplier
from stages.shape.spec import head_dim


class Embedding(nn.Embedding):
    """A row of the matrix for each token."""

    def reset_parameters(self) -> None:
        """Draw initial values; on the meta device there are none, and torch would import its compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        if not is_added_in_backward(self.weight):
            return super().forward(input)
        return cast(Tensor, _Rows.apply(input, self.weight))  # type: ignore[no-untyped-call]


class _Rows(torch.autograd.Function):
    """Rows of a matrix whose gradient autograd does not see."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        add_rows(ctx.parameter.grad, gradient.flatten(0, -2), tokens.flatten())
        return None, None


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467), times `multiplier`."""

    def __init__(self, width: int, eps: float, *, multiplier: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        out = F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return out if self.multiplier == 1 else out * self.multiplier


class Attention(nn.Module):
    """Causal attention: rotary positions (arXiv 2104.09864), grouped key/value heads (2305.13245).

    Args:
        config: the model's.
        normalized: queries and keys of each head are normalized before they are rotated (arXiv 2302.05442).
    """

    def __init__(self, config: ModelConfig, *, normalized: bool = False) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        self.scale = attention_scale(config)
        queries, keys = config.heads * self.head_dim, config.kv_heads * self.head_dim
        self.query = Linear(config.width, queries)
        self.key = Linear(config.width, keys)
        self.value = Linear(config.width, keys)
        self.output = Linear(queries, config.width)
        self.query_norm = RMSNorm(self.head_dim, config.norm_eps) if normalized else None
        self.key_norm = RMSNorm(self.head_dim, config.norm_eps) if normalized else None

    def forward(self, x: Tensor, rotation: Tensor, documents: Documents | None = None) -> Tensor:
        """Attend within each sequence, or within each document.

        Args:
            x: `(batch, context, width)`.
            rotation: `(2, context, head_dim)`, the cosines and sines of `rotary_table`; with documents
                `(2, batch, 1, context, head_dim)`.
            documents: of the sequences; None: each is attended to as a whole.
        """
        batch, context, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, context, -1, self.head_dim)

        def rotated(projected: Tensor, rotation: Tensor, *, norm: RMSNorm | None) -> Tensor:
            by_head = heads(projected)
            return rotate((by_head if norm is None else norm(by_head)).transpose(1, 2), rotation)

        query = cheap(partial(rotated, norm=self.query_norm), self.query(x), rotation)
        key = cheap(partial(rotated, norm=self.key_norm), self.key(x), rotation)
        value = heads(self.value(x)).transpose(1, 2)
        if documents is not None:
            scale = self.head_dim**-0.5 if self.scale is None else self.scale
            mixed, _ = document_attention(query, key, value, documents.ends, documents.bounds, scale)
        else:
            queries_per_key = query.shape[1] // key.shape[1]
            if queries_per_key > 1 and not takes_groups(query):
                key, value = (kept.repeat_interleave(queries_per_key, dim=1) for kept in (key, value))
            mixed = F.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, context, -1))
        return out


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(cheap(_gated, self.gate(x), self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind its norm, each added to the residual stream.

    Where a stage begins or ends within the block, one of the two is None.
    """

    def __init__(self, config: ModelConfig, *, attention: Attention | None, mlp: nn.Module | None) -> None:
        super().__init__()
        self.attention_norm = None if attention is None else RMSNorm(config.width, config.norm_eps)
        self.attention = attention
        self.mlp_norm = None if mlp is None else RMSNorm(config.width, config.norm_eps)
        self.mlp = mlp
        self.multiplier = residual_multiplier(config)

    def forward(self, x: Tensor, rotation: Tensor, documents: Documents | None = None) -> Tensor:
        if self.attention is not None and self.attention_norm is not None:
            x = self._added(x, self.attention(cheap(self.attention_norm, x), rotation, documents))
        if self.mlp is not None and self.mlp_norm is not None:
            x = self._added(x, self.mlp(cheap(self.mlp_norm, x)))
        return x

    def _added(self, x: Tensor, part: Tensor) -> Tensor:
        return x + part if self.multiplier == 1 else torch.add(x, part, alpha=self.multiplier)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def takes_groups(query: Tensor) -> bool:
    """Whether attention has a kernel for grouped heads that does not store all scores: on a GPU only for
    narrow types."""
    return not query.is_cuda or query.dtype != torch.float32


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn heads `(..., context, head_dim)` by their positions' angles, in the table's type: in bfloat16 the
    angles of late positions would be wrong."""
    cosine, sine = rotation[0, ..., : x.shape[-2], :], rotation[1, ..., : x.shape[-2], :]
    wide = x.to(rotation.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
