"""Numbers of values that parts of a model keep, and their bytes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

INDEX_BYTES = 8
"""Size of an index or a token id."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """Numbers of values by the type that they are computed in."""

    narrow: int = 0
    """In the type of the weights that forward and backward compute with."""
    wide: int = 0
    """In that type, or in float32 where it is narrower: norms, sums of attention, the router, the loss."""
    indices: int = 0
    """Integers of 8 bytes."""

    def __add__(self, other: Values) -> Values:
        return Values(
            narrow=self.narrow + other.narrow,
            wide=self.wide + other.wide,
            indices=self.indices + other.indices,
        )

    def bytes(self, *, narrow: int, wide: int) -> int:
        """Bytes, with those of one value of each type."""
        return self.narrow * narrow + self.wide * wide + self.indices * INDEX_BYTES


@dataclass(frozen=True, kw_only=True)
class CheapPart:
    """What selective recomputation computes again at once (`stages.model.selective`), per token."""

    made: Values
    """Activations, with the part's output."""
    widened: int = 0
    """Values of its input that are made, too, in a wider type where there is one."""

    def bytes(self, *, narrow: int, wide: int) -> int:
        """Bytes, with those of one value of each type."""
        return self.made.bytes(narrow=narrow, wide=wide) + (self.widened * wide if wide != narrow else 0)
