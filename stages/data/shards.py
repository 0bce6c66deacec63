"""Token shards on disk, read through memory maps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

MOST_MAPS = 256
"""Maximal number of open memory maps, each of which holds a file descriptor."""


class DataError(ValueError):
    """The configured data cannot be trained on."""

    key = "data.path"
    """The configuration key that names it."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A contiguous range of tokens in a file."""

    file: Path
    dtype: str
    """numpy name of the token type; little-endian."""
    header: int = 0
    """Bytes before the file's first token."""
    first: int = 0
    """Index of this shard's first token in the file."""
    tokens: int


class Tokens:
    """The concatenated tokens of several shards.

    Args:
        shards: in order. Their files are mapped, so they may be larger than memory.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._map = lru_cache(maxsize=MOST_MAPS)(self._mapped)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, starts: np.ndarray, *, length: int) -> np.ndarray:
        """Windows of `length` tokens, int64 `(len(starts), length)`; a window may span several shards."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            index = bisect_right(self._ends, start)
            filled = 0
            while filled < length:
                shard = self._map(index)
                begin = start + filled - (self._ends[index] - len(shard))
                part = shard[begin : begin + length - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
                index += 1
        return out

    def _mapped(self, index: int) -> np.ndarray:
        return mapped(self._shards[index])


def mapped(shard: Shard) -> np.ndarray:
    """Memory map of a shard's tokens, `(tokens,)` of its type."""
    dtype = little_endian(shard.dtype)
    if shard.tokens == 0:
        return np.empty(0, dtype=dtype)
    offset = shard.header + shard.first * dtype.itemsize
    return np.memmap(shard.file, dtype=dtype, mode="r", offset=offset, shape=(shard.tokens,))


def little_endian(dtype: str) -> np.dtype:
    """The little-endian form of a type, as in files."""
    return np.dtype(dtype).newbyteorder("<")


def dtype_for(vocab_size: int) -> str:
    """The narrowest unsigned type that holds every token of a vocabulary."""
    for dtype in ("uint8", "uint16"):
        if vocab_size <= 2 ** (8 * np.dtype(dtype).itemsize):
            return dtype
    return "uint32"


def count(shards: Sequence[Shard]) -> int:
    """Total number of tokens."""
    return sum(shard.tokens for shard in shards)


def cut(shards: Sequence[Shard], *, at: int) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Split shards into their first `at` tokens and the rest."""
    before: list[Shard] = []
    after: list[Shard] = []
    for shard in shards:
        here = min(shard.tokens, max(0, at - count(before) - count(after)))
        if here:
            before.append(replace(shard, tokens=here))
        if here < shard.tokens:
            after.append(replace(shard, first=shard.first + here, tokens=shard.tokens - here))
    return tuple(before), tuple(after)
