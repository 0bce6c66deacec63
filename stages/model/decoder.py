"""The decoder, built one stage at a time: embedding, blocks of the model's family, norm and untied head.

Parameters carry the names that they have in the whole model (`blocks.3.attention.query.weight`), however the
model is cut. Each is initialised from a generator seeded by the run's seed and that name, so the initial
weights do not depend on the cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.config import ModelConfig
from stages.model.families import FAMILIES
from stages.model.layers import RMSNorm
from stages.model.partition import StageCut
from stages.model.spec import head_dim
from stages.model.split_backward import Linear

INITIAL_STD = 0.02


RunBlock = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""Runs a block on activations and the rotary table; None: the block is the user's own and takes no table."""


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
        make_block = FAMILIES[config.family].make_block
        self.blocks = nn.ModuleDict({str(index): make_block(config) for index in cut.blocks})
        self.norm = RMSNorm(config.width, config.norm_eps) if cut.has_head else None
        self.head = Linear(config.width, config.vocab_size) if cut.has_head else None
        self.rotation: Tensor | None = None
        self.run_block: RunBlock = run_as_it_stands
        """Runs each block; see `stages.model.block_runner`."""

    def prepare(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Compute the rotary table. Parameters are put in place by `WeightVersions`."""
        self.rotation = rotary_table(self.config, context=self.context).to(device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        assert self.rotation is not None
        for block in self.blocks.values():
            x = self.run_block(block, x, self.rotation)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def rotary_table(config: ModelConfig, *, context: int) -> Tensor:
    """Cosines and sines `(2, context, head_dim)` in float64; the two halves of a head rotate together."""
    half = head_dim(config) // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos(), angle.sin()))


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
