"""Token shards on disk, read where they are."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MOST_OPEN = 256
"""Most files that are kept open."""


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
        shards: in order. They may be larger than memory.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._open = lru_cache(maxsize=MOST_OPEN)(self._opened)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, starts: np.ndarray, *, length: int) -> np.ndarray:
        """Windows of `length` tokens, int64 `(len(starts), length)`; a window may span several shards.

        Raises:
            DataError: a file cannot be read, or is shorter than it was.
        """
        import numpy as np

        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            index = bisect_right(self._ends, start)
            filled = 0
            while filled < length:
                shard = self._shards[index]
                begin = start + filled - (self._ends[index] - shard.tokens)
                part = self._part(index, begin, min(length - filled, shard.tokens - begin))
                row[filled : filled + len(part)] = part
                filled += len(part)
                index += 1
        return out

    def _part(self, index: int, begin: int, length: int) -> np.ndarray:
        """Read, not mapped: a process that reads what is no longer there of a mapped file is killed."""
        import numpy as np

        shard, dtype = self._shards[index], little_endian(self._shards[index].dtype)
        offset = shard.header + (shard.first + begin) * dtype.itemsize
        try:
            raw = os.pread(self._open(index).descriptor, length * dtype.itemsize, offset)
        except OSError as error:
            raise DataError(f"{shard.file} cannot be read ({error.strerror})") from error
        if len(raw) < length * dtype.itemsize:
            raise DataError(
                f"{shard.file} was truncated while it was read: it ends at byte {offset + len(raw)}"
            )
        return np.frombuffer(raw, dtype)

    def _opened(self, index: int) -> _OpenFile:
        return _OpenFile(self._shards[index].file)


class _OpenFile:
    """Closed when nothing refers to it any more."""

    def __init__(self, file: Path) -> None:
        self.descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class ShardWatch:
    """Notices that the files of shards change after they were opened.

    Args:
        shards: of a run.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = [shard for shard in shards if shard.tokens]
        self._total = count(self._shards)
        self._marks = {file: _mark(file) for file in {shard.file for shard in shards}}
        self._sample = [self._digest(shard) for shard in self._shards]

    def change(self, *, thorough: bool = False) -> str | None:
        """The first change, in words.

        Args:
            thorough: read a sample of the tokens again, for a change that kept size and time.
        """
        for file, mark in self._marks.items():
            if (now := _mark(file)) not in (None, mark):  # what is gone is still open
                return f"{file} has changed since the run began to read it: {_difference(mark, now)}"
        for shard, digest in zip(self._shards, self._sample, strict=True) if thorough else ():
            if _mark(shard.file) is not None and self._digest(shard) != digest:
                return f"{shard.file} has changed since the run began to read it: it has other tokens"
        return None

    def _digest(self, shard: Shard) -> bytes:
        """A hash of some windows that are spread evenly over the shard."""
        import numpy as np

        length = min(SAMPLE_LENGTH, shard.tokens)
        windows = 1 + SAMPLES * shard.tokens // self._total
        starts = np.linspace(0, shard.tokens - length, windows, dtype=np.int64)
        return hashlib.sha256(Tokens([shard]).rows(starts, length=length).tobytes()).digest()


SAMPLES, SAMPLE_LENGTH = 64, 8192
"""About the number, and the length, of the windows that are read again at the end of a run."""


def _mark(file: Path) -> tuple[int, int, int] | None:
    """Size, modification time and inode."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _difference(before: tuple[int, int, int] | None, now: tuple[int, int, int] | None) -> str:
    if before is None or now is None or before[2] != now[2]:
        return "another file is there"
    if before[0] != now[0]:
        return f"{now[0]:,} bytes for {before[0]:,}"
    return "it was written to"


def little_endian(dtype: str) -> np.dtype:
    """The little-endian form of a type, as in files."""
    import numpy as np

    return np.dtype(dtype).newbyteorder("<")


def dtype_for(vocab_size: int) -> str:
    """The narrowest unsigned type that holds every token of a vocabulary."""
    return next((f"uint{bits}" for bits in (8, 16) if vocab_size <= 2**bits), "uint32")


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
