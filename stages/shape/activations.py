"""How many values parts of a model keep, with their bytes, and how many its stages send each other. Imports
no torch."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.messages import Kind

INDEX_BYTES = 8
"""Size of an index or a token id."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """Numbers of values by the type that they are computed in."""

    narrow: int = 0
    """In the type of the weights that forward and backward compute with."""
    wide: int = 0
    """In that type, or in float32 where it is narrower: norms, sums of attention, the router, the loss."""
    normalized: int = 0
    """Inputs of norms. Kernels of a CPU keep them widened and normalized, a GPU's as they are."""
    indices: int = 0
    """Integers of 8 bytes."""

    def __add__(self, other: Values) -> Values:
        return Values(
            narrow=self.narrow + other.narrow,
            wide=self.wide + other.wide,
            normalized=self.normalized + other.normalized,
            indices=self.indices + other.indices,
        )

    def bytes(self, *, narrow: int, wide: int, fused: bool) -> int:
        """Bytes, with those of one value of each type; `fused`: norms are a kernel each, as on a GPU."""
        of_norms = self.normalized * (narrow if fused else 2 * wide)
        return self.narrow * narrow + self.wide * wide + of_norms + self.indices * INDEX_BYTES


@dataclass(frozen=True, kw_only=True)
class CheapPart:
    """What selective recomputation computes again at once (`stages.model.gradients.selective`), per token."""

    made: Values
    """Activations, with the part's output."""
    normalized: int = 0
    """Values of a norm's input. Kernels of a CPU make them normalized, and widened where there is a wider
    type; a fused one of a GPU neither."""

    def bytes(self, *, narrow: int, wide: int, fused: bool) -> int:
        """Bytes that it adds for each token; arguments as for `Values.bytes`."""
        copies = 0 if fused else 1 if wide == narrow else 2
        return self.made.bytes(narrow=narrow, wide=wide, fused=fused) + copies * self.normalized * wide


def message_width(kind: Kind, *, width: int, per_wide: int) -> int:
    """How many values a message between stages has per token.

    All messages have the type of the activations. Sums of a softmax need at least float32: one takes two
    values where activations are bfloat16.

    Args:
        kind: of the message.
        width: of the model.
        per_wide: values of a message that hold one number of at least float32.
    """
    if kind is Kind.PART:
        # Two terms of the gradient of the hidden states, and per token the logarithm of the shard's sum and
        # the logit of the target.
        return 2 * width + 2 * per_wide
    return per_wide if kind is Kind.SUMS else width
