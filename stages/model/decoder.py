"""The decoder, built one stage at a time: embedding, blocks of the model's family, norm and head.

Parameters carry the names that they have in the whole model (`blocks.3.attention.query.weight`), however the
model is cut. Each is initialised from a generator seeded by the run's seed and that name, so the initial
weights do not depend on the cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stages.config.run_config import ModelConfig
from stages.data.documents import Documents
from stages.model.experts import ExpertBlock, Routing
from stages.model.gradients.split_backward import Linear
from stages.model.head_loss import capped, head_loss
from stages.model.head_shard import HeadShard
from stages.model.layers import MLP, Attention, Block, Embedding, RMSNorm
from stages.shape.families import FAMILIES
from stages.shape.moe import has_experts
from stages.shape.parametrization import initial_std, output_multiplier
from stages.shape.partition import StageCut
from stages.shape.spec import head_dim

RunBlock = Callable[..., Any]
"""Runs a block, its first argument, on what the block's `forward` takes, and returns what that returns."""


Place = tuple[Tensor | None, *tuple[Documents, ...]]
"""The rotary table of a micro-batch, and its documents, where it is masked by them."""


def run_as_it_stands(block: nn.Module, *given: Any) -> Any:
    """Call the block."""
    return block(*given)


def make_block(
    config: ModelConfig, *, experts: bool, attention: bool = True, mlp: bool = True
) -> Block | ExpertBlock:
    """A block of the model's family, or one of its halves.

    Args:
        config: the model.
        experts: the block has experts in place of an MLP.
        attention: with its attention.
        mlp: with its MLP or experts.
    """
    own_attention = Attention(config, normalized=FAMILIES[config.family].normalized) if attention else None
    if experts and mlp:
        return ExpertBlock(config, attention=own_attention)
    return Block(config, attention=own_attention, mlp=MLP(config.width, config.mlp_width) if mlp else None)


class Stage(nn.Module):
    """The part of the decoder that one pipeline stage computes.

    The first stage takes token ids `(batch, context)`; later ones take activations `(batch, context, width)`.
    The last stage returns logits `(batch, context, vocab_size)`; earlier ones return activations. A stage may
    begin or end between a block's attention and its MLP. A shard of the head takes what the last stage with
    blocks returns, and returns its part of the loss (`stages.model.head_shard`). One of a tied head also
    takes token ids, without targets, and returns those in its rows embedded.
    """

    def __init__(self, config: ModelConfig, cut: StageCut, *, context: int) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.embedding: Embedding | HeadShard | None = None
        if cut.head_rows is not None and cut.has_embedding:
            self.embedding = HeadShard(config.width, cut.head_rows)
        elif cut.has_embedding:
            self.embedding = Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleDict(
            {
                str(block): make_block(
                    config,
                    experts=has_experts(config, block),
                    attention=2 * block in halves,
                    mlp=2 * block + 1 in halves,
                )
                for block, halves in zip(cut.blocks, cut.pieces, strict=True)
            }
        )
        self.norm = (
            RMSNorm(config.width, config.norm_eps, multiplier=output_multiplier(config))
            if cut.has_head or cut.has_norm
            else None
        )
        self.head: Linear | HeadShard | None = None
        if cut.has_head:
            self.head = Linear(config.width, config.vocab_size)
        elif isinstance(self.embedding, HeadShard):
            self.head = self.embedding
        elif cut.head_rows is not None:
            self.head = HeadShard(config.width, cut.head_rows)
        if isinstance(self.head, Linear) and config.tied:
            # Of another stage where this one has no embedding: put in place by
            # `stages.weights.tied_head`.
            self.head.register_parameter("weight", None)
        self._tie()
        self.rotation: Tensor | None = None
        self.run_block: RunBlock = run_as_it_stands
        """Runs each block; see `stages.model.runner`."""

    @property
    def expert_blocks(self) -> list[int]:
        """Numbers of the blocks whose experts this stage has."""
        return [int(index) for index, block in self.blocks.items() if isinstance(block, ExpertBlock)]

    def prepare(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Compute the rotary table, in float32 at least. Parameters are put in place by `WeightVersions`."""
        self._tie()
        wide = torch.promote_types(dtype, torch.float32)
        self.rotation = rotary_table(self.config, context=self.context).to(device=device, dtype=wide)

    def _tie(self) -> None:
        if self.config.tied and isinstance(self.head, Linear) and isinstance(self.embedding, Embedding):
            self.head.weight = self.embedding.weight

    def forward(
        self,
        x: Tensor,
        routing: Routing | None = None,
        *,
        targets: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Run the stage.

        Args:
            x: see `Stage`.
            routing: of the micro-batch, for blocks of experts; None: balance biases are 0, and loads are not
                reported.
            targets: token ids `(batch, context)`, of which the last stage returns the mean loss, in nats per
                token; None: it returns the logits.
            documents: of the micro-batch, within which attention stays; None: within the sequences.
        """
        if isinstance(self.head, HeadShard):
            part: Tensor = self.head.embed(x) if targets is None else self.head(x, targets)
            return part
        if isinstance(self.embedding, Embedding):
            x = self.embedding(x)
        place = self.place(documents)
        for index in self.blocks:
            x = self.apply_block(index, x, routing, place, run=self.run_block)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            cap = self.config.logit_softcap
            if targets is None:
                return capped(self.head(x), cap)
            return head_loss(self.head, x, targets, softcap=cap, z_loss=self.config.z_loss)
        return x

    def place(self, documents: Documents | None) -> Place:
        """What all blocks take of a micro-batch besides its activations."""
        if documents is None or self.rotation is None:
            return (self.rotation,)
        rotation = self.rotation.index_select(1, documents.positions.flatten())
        batch, context = documents.positions.shape
        return rotation.view(2, batch, 1, context, -1), documents

    def apply_block(
        self, index: str, x: Tensor, routing: Routing | None, place: Place, *, run: RunBlock
    ) -> Tensor:
        """The output of one block.

        Args:
            index: the block's number in the model.
            x: its input, `(batch, context, width)`.
            routing: as for `forward`.
            place: see `place`.
            run: runs the block.
        """
        block = self.blocks[index]
        rotation, *documents = place
        if not isinstance(block, ExpertBlock):
            dense: Tensor = run(block, x, rotation, *documents)
            return dense
        number = int(index)
        bias = x.new_zeros(self.config.experts).float() if routing is None else routing.biases[number]
        out: Tensor
        out, load = run(block, x, rotation, bias, *documents)
        if routing is not None:
            routing.loads[number] = load
        return out


def rotary_table(config: ModelConfig, *, context: int) -> Tensor:
    """Cosines and sines `(2, context, head_dim)` in float64; the two halves of a head rotate together."""
    half = head_dim(config) // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos(), angle.sin()))


@torch.no_grad()
def initialise(parameter: Tensor, *, name: str, seed: int, model: ModelConfig) -> None:
    """Fill one parameter with its initial values, which depend on its name and the seed alone.

    Norm weights are 1, biases 0; matrices are normal (`stages.shape.parametrization.initial_std`). Each
    matrix of a stack of experts is drawn for itself, under the stack's name and the expert's number.
    """
    if parameter.ndim <= 1:
        parameter.fill_(0.0 if name.rpartition(".")[2] == "bias" else 1.0)
        return
    if ".experts." in name and parameter.ndim == 3:
        for expert, matrix in enumerate(parameter):
            initialise(matrix, name=expert_name(name, expert), seed=seed, model=model)
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = initial_std(model, name)
    values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    parameter.copy_(values)


def expert_name(stack: str, expert: int) -> str:
    """Name of one matrix of a stack, as in `blocks.3.experts.up.17`."""
    return f"{stack}.{expert}"
