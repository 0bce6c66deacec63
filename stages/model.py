"""The decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention, untied head), built one stage at a time.

Parameters carry the names that they have in the whole model (`blocks.3.attention.query.weight`), however the
model is cut, and each is initialised from a generator seeded by the run's seed and that name: so the weights
that a run starts from do not depend on the cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.config import ModelConfig
from stages.partition import StageCut
from stages.split_backward import Linear

INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention: rotary positions (arXiv 2104.09864), grouped key/value heads (2305.13245)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        kv_width = config.kv_heads * self.head_width
        self.query = Linear(config.width, config.width)
        self.key = Linear(config.width, kv_width)
        self.value = Linear(config.width, kv_width)
        self.output = Linear(config.width, config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Attend within each sequence.

        Args:
            x: `(batch, context, width)`.
            rotation: `(2, context, head_width)`, the cosines and sines of `rotary_table`.
        """
        batch, context, width = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, context, -1, self.head_width).transpose(1, 2)

        query = _rotate(heads(self.query(x)), rotation)
        key = _rotate(heads(self.key(x)), rotation)
        mixed = F.scaled_dot_product_attention(
            query, key, heads(self.value(x)), is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, context, width))
        return out


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_width)
        self.up = Linear(config.width, config.mlp_width)
        self.down = Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind its norm, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


RunBlock = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""Runs a block on activations and the table of rotations; None: it is the user's own and takes none."""


def run_as_it_stands(block: nn.Module, x: Tensor, rotation: Tensor | None) -> Tensor:
    """Call the block."""
    out: Tensor = block(x) if rotation is None else block(x, rotation)
    return out


class Stage(nn.Module):
    """The part of the decoder that one pipeline stage computes.

    The first stage takes token ids `(batch, context)`; later ones take activations `(batch, context, width)`.
    The last stage returns logits `(batch, context, vocab_size)`; earlier ones return activations.
    """

    def __init__(self, config: ModelConfig, cut: StageCut, *, context: int) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.embedding = nn.Embedding(config.vocab_size, config.width) if cut.has_embedding else None
        self.blocks = nn.ModuleDict({str(index): Block(config) for index in cut.blocks})
        self.norm = RMSNorm(config.width, config.norm_eps) if cut.has_head else None
        self.head = Linear(config.width, config.vocab_size) if cut.has_head else None
        self.rotation: Tensor | None = None
        self.run_block: RunBlock = run_as_it_stands
        """How each block is run; see `stages.blocks`."""

    def prepare(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Make the table of rotations; parameters are put in place by whoever owns them."""
        self.rotation = rotary_table(self.config, context=self.context).to(device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        assert self.rotation is not None
        for block in self.blocks.values():
            x = self.run_block(cast(Block, block), x, self.rotation)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def rotary_table(config: ModelConfig, *, context: int) -> Tensor:
    """Cosines and sines `(2, context, head_width)` in float64; the two halves of a head rotate together."""
    half = config.width // config.heads // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos(), angle.sin()))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cosine, sine = rotation[0, : x.shape[-2]], rotation[1, : x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, computed in at least float32.

    Args:
        logits: `(batch, context, vocab_size)`.
        targets: `(batch, context)` token ids.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


@torch.no_grad()
def initialise(parameter: Tensor, *, name: str, seed: int, layers: int) -> None:
    """Fill one parameter with its initial values, which depend on its name and the seed alone.

    Norm weights are 1, biases 0; matrices are normal with standard deviation 0.02, and those that write
    into the residual stream (`attention.output`, `mlp.down`) with 0.02 / sqrt(2 layers) (GPT-2's rule).
    """
    if parameter.ndim <= 1:
        parameter.fill_(0.0 if name.rpartition(".")[2] == "bias" else 1.0)
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = INITIAL_STD
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        std /= (2 * layers) ** 0.5
    values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    parameter.copy_(values)
