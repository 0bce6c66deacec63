"""The description of a model: its parameters, and what its parts compute and keep. Imports no torch.

A model is an embedding, blocks, and a head. Blocks are alike, but for the first ones of some mixtures of
experts; each has two halves, its attention, and its MLP or experts. Memory, partition, planner, utilisation,
optimizer groups, export and import read the description; none of them knows a shape or a formula of its own.

Counts are per token. What is computed and what is stored are stated apart: a part may have more parameters
than one token meets.

Experts are stacks of matrices, parameters of shape (experts, rows, columns). A module computes with a whole
stack. Optimizers, data ranks, checkpoints and initial values handle its matrices, its members, one by one:
`blocks.3.experts.up.5` is the sixth matrix of `blocks.3.experts.up`. Every other parameter is its own only
member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import prod
from typing import Any, NamedTuple

from optimizers.grouping import DECAYED, Role
from stages.config.run_config import ModelConfig
from stages.shape.activations import CheapPart, Values
from stages.shape.head import whole_name

Shape = tuple[int, ...]


def is_stack(shape: Shape) -> bool:
    """Whether a parameter of this shape is a stack."""
    return len(shape) == 3


def member_count(shape: Shape) -> int:
    """Number of members of a parameter of this shape."""
    return shape[0] if is_stack(shape) else 1


def member_shape(shape: Shape) -> Shape:
    """The shape of each of its members."""
    return shape[1:] if is_stack(shape) else shape


def member_names(name: str, shape: Shape) -> tuple[str, ...]:
    """The names of its members."""
    return tuple(f"{name}.{index}" for index in range(shape[0])) if is_stack(shape) else (name,)


EXPERT = "{expert}"
"""Stands in a stack's `hf_name` for the number of the expert."""


class ModelPart(StrEnum):
    """A part of a model."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"
    """The last norm and the projection on the vocabulary."""


class Parameter(NamedTuple):
    """One parameter tensor."""

    name: str
    """In the whole model, as in `blocks.3.mlp.up.weight`; in a block's description without `blocks.3.`."""
    shape: tuple[int, ...]
    role: Role
    """Decides the optimizer's rule and weight decay."""
    hf_name: str
    """In Hugging Face transformers, likewise; of a stack with `EXPERT` for the number of the expert."""
    part: ModelPart = ModelPart.BLOCK

    def members(self) -> Iterator[Parameter]:
        """Its members as parameters; most parameters are their own only one."""
        if not is_stack(self.shape):
            yield self
            return
        for index, name in enumerate(member_names(self.name, self.shape)):
            yield self._replace(
                name=name, shape=member_shape(self.shape), hf_name=self.hf_name.replace(EXPERT, str(index))
            )

    def in_block(self, index: int) -> Parameter:
        """This parameter of block `index`, with the names that it has in the whole model."""
        return self._replace(
            name=f"blocks.{index}.{self.name}", hf_name=f"model.layers.{index}.{self.hf_name}"
        )

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def decayed(self) -> bool:
        """Whether it is under weight decay."""
        return self.role in DECAYED


def matrix(name: str, rows: int, columns: int, hf_name: str) -> Parameter:
    """A weight matrix of a block; `name` and `hf_name` without the `.weight` at their end."""
    return Parameter(f"{name}.weight", (rows, columns), Role.MATRIX, f"{hf_name}.weight")


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """What a part, or a piece of one, holds, computes and keeps; counts are per token.

    Pieces are added: a block is the sum of its attention and its MLP.
    """

    parameters: tuple[Parameter, ...] = ()
    """In the module's order."""
    biases: tuple[Parameter, ...] = ()
    """Balance biases of experts: they belong to a weight version, but a rule moves them, not an optimizer."""
    idle: int = 0
    """Values of the parameters that a token does not meet: of experts that it is not sent to."""
    multiply_adds: int = 0
    """Multiply-adds of a token's forward with matrices, without those of attention's scores."""
    attention: int = 0
    """Multiply-adds of causal attention in a forward, for each token of context: half of the context on
    average, for the scores and for the values."""
    kept: Values = field(default_factory=Values)
    """Activations kept from forward to backward, without the part's input."""
    kept_selectively: Values = field(default_factory=Values)
    """Activations kept under selective recomputation; of a block with its input."""
    cheap: tuple[CheapPart, ...] = ()
    """What selective recomputation computes again."""
    deferred: Values = field(default_factory=Values)
    """Values kept between the halves of a split backward: inputs of the matrices and gradients of their
    outputs."""
    passing: Values = field(default_factory=Values)
    """The most values that are alive at once within a backward."""

    def __add__(self, other: PartSpec) -> PartSpec:
        most = max(self.passing, other.passing, key=lambda values: values.narrow + values.wide)
        sums = {
            entry.name: getattr(self, entry.name) + getattr(other, entry.name)
            for entry in fields(self)
            if entry.name != "passing"
        }
        return PartSpec(**sums, passing=most)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    def forward_multiply_adds(self, *, context: int) -> int:
        """Multiply-adds of a token's forward, in sequences of `context` tokens."""
        return self.multiply_adds + self.attention * context

    def training_flops(self, *, context: int) -> int:
        """Floating-point operations of a forward and a backward, by the convention of MFU.

        Six for every weight that a token meets, those of norms included, and attention as if it were not
        causal (arXiv 2204.02311, appendix B). Recomputed activations do not count.
        """
        gains = sum(parameter.size for parameter in self.parameters if parameter.role is Role.VECTOR)
        return 6 * (self.multiply_adds + gains + 2 * self.attention * context)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model by its parts."""

    embedding: PartSpec
    blocks: tuple[PartSpec, ...]
    halves: tuple[PartSpec, ...]
    """Halves of the blocks: number 2 b is the attention of block b, 2 b + 1 its MLP or experts."""
    norm: PartSpec
    """The norm before the head, which is a part of `head`."""
    head: PartSpec
    tied: Parameter | None = None
    """The embedding's matrix, where the head multiplies with it, too; a parameter of the embedding alone."""

    def parameters(self, halves: range, *, embedding: bool, head: bool) -> Iterator[Parameter]:
        """Parameters of some of the halves, and of the ends where asked, in the module's order."""
        if embedding:
            yield from self.embedding.parameters
        for half in halves:
            for parameter in self.halves[half].parameters:
                yield parameter.in_block(half // 2)
        if head:
            yield from self.head.parameters

    def whole(self) -> Iterator[Parameter]:
        """All parameters, in the order of a module that holds the whole model."""
        return self.parameters(range(len(self.halves)), embedding=True, head=True)

    def piece(self, halves: range) -> PartSpec:
        """A block, or a half of one, by its one or two halves."""
        return self.blocks[halves[0] // 2] if len(halves) == 2 else self.halves[halves[0]]

    def biases(self) -> Iterator[Parameter]:
        """The balance biases of all blocks of experts."""
        for index, block in enumerate(self.blocks):
            for bias in block.biases:
                yield bias.in_block(index)

    def role(self, name: str) -> Role:
        """The role of the parameter with this name in the whole model, or of some of its rows."""
        name = whole_name(name)
        listed: tuple[Parameter, ...] = (*self.embedding.parameters, *self.head.parameters)
        if name.startswith("blocks."):
            _, index, name = name.split(".", 2)
            listed = self.blocks[int(index)].parameters
        return next(parameter.role for parameter in listed if parameter.name == name)

    @property
    def parameter_count(self) -> int:
        """Values of the whole model."""
        return sum(part.parameter_count for part in self._parts)

    @property
    def idle_count(self) -> int:
        """Values that a token does not meet, as in `PartSpec.idle`."""
        return sum(part.idle for part in self._parts)

    @property
    def active_count(self) -> int:
        """Values that a token meets: in a mixture of experts fewer than all."""
        return self.parameter_count - self.idle_count

    @property
    def _parts(self) -> tuple[PartSpec, ...]:
        return (self.embedding, *self.blocks, self.head)

    def training_flops(self, *, context: int) -> int:
        """FLOPs of a token's forward and backward through the whole model (`PartSpec.training_flops`)."""
        return sum(part.training_flops(context=context) for part in self._parts)


def norm(
    name: str, width: int, hf_name: str, *, count: int = 1, part: ModelPart = ModelPart.BLOCK
) -> PartSpec:
    """An RMSNorm over `width` values, applied to `count` vectors of a token; its output is not in it.

    Backward needs the input and the root mean square of each vector; kernels of a CPU keep the normalized
    values, too.
    """
    gain = Parameter(f"{name}.weight", (width,), Role.VECTOR, f"{hf_name}.weight", part)
    return PartSpec(
        parameters=(gain,),
        kept=Values(wide=count, normalized=count * width),
        kept_selectively=Values(narrow=count * width),
        cheap=(
            CheapPart(
                made=Values(narrow=count * width, wide=count),
                normalized=count * width,
            ),
        ),
    )


def decoder(config: ModelConfig, attention: PartSpec, mlps: tuple[PartSpec, ...]) -> ModelSpec:
    """A decoder with blocks of this attention and these MLPs, or experts, between an embedding and a head
    behind a norm."""
    width, vocabulary = config.width, config.vocab_size
    shape = (vocabulary, width)
    table = Parameter(
        "embedding.weight", shape, Role.EMBEDDING, "model.embed_tokens.weight", ModelPart.EMBEDDING
    )
    projection = PartSpec(
        parameters=()
        if config.tied
        else (Parameter("head.weight", shape, Role.HEAD, "lm_head.weight", ModelPart.HEAD),),
        multiply_adds=width * vocabulary,
        kept=Values(narrow=width, wide=vocabulary),
        deferred=Values(narrow=width + vocabulary),
        # The loss is computed in a wider type where the logits are narrow.
        passing=Values(narrow=vocabulary, wide=vocabulary),
    )
    last_norm = norm("norm", width, "model.norm", part=ModelPart.HEAD)
    kinds = {id(mlp): attention + mlp for mlp in mlps}
    return ModelSpec(
        # A look-up: no arithmetic, and no activation is needed for its gradient.
        embedding=PartSpec(parameters=(table,)),
        blocks=tuple(kinds[id(mlp)] for mlp in mlps),
        halves=tuple(half for mlp in mlps for half in (attention, mlp)),
        norm=last_norm,
        head=last_norm + projection,
        tied=table if config.tied else None,
    )


def head_dim(config: ModelConfig) -> int:
    """Width of one attention head."""
    return config.head_dim if config.head_dim is not None else config.width // config.heads


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The class of Hugging Face transformers that computes the same."""

    model_type: str
    architecture: str
    settings: Mapping[str, Any]
    """Further content of its config.json, which the computation depends on."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further content of its config.json, which the computation does not depend on, or which the shapes of
    the weights tell."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of `settings` that the class takes where a config.json leaves them out."""
    rotary_share: float = 1.0
    """Share of a head that the class rotates where a config.json leaves it out; here all of it is."""
    has_bias: bool = False
    """Whether the class has a place for balance biases."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that differ in their sizes alone."""

    attention: Callable[[ModelConfig], PartSpec]
    """Describes a block's attention; experts are the same in all families."""
    mlp: Callable[[ModelConfig], PartSpec]
    """Describes a block's MLP."""
    normalized: bool = False
    """Whether queries and keys are normalized by head."""
    hugging_face: HuggingFace
    """The class for dense models of the family."""
