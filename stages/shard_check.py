"""Reading token shards whole, once: their checksums and their largest token.

What was found is kept in the user's cache folder, by the file's size and time of change, so that a second
look at the same file costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from stages.shards import DataError, Shard, little_endian

BLOCK = 1 << 22
THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Known:
    """What reading a shard's whole file told."""

    sha256: str
    largest: int
    """Token."""
    smallest: int


def check_shards(
    shards: Iterable[Shard], *, checksums: Mapping[Path, str], vocab_size: int | None, cache: Path
) -> int:
    """Read every shard that has not been read before. The largest token there is.

    Args:
        shards: of any format.
        checksums: what the SHA-256 of some files must be.
        vocab_size: tokens must be below it; None: whatever there is goes.
        cache: where the findings are kept.

    Raises:
        DataError: a file is not what its checksum says, or holds a token out of range.
    """
    by_file = {shard.file: shard for shard in shards}
    largest = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for shard, known in zip(
            by_file.values(),
            pool.map(lambda shard: known_of(shard, cache=cache), by_file.values()),
            strict=True,
        ):
            if shard.file in checksums and checksums[shard.file] != known.sha256:
                raise DataError(
                    f"{shard.file} is not what its manifest says: SHA-256 is {known.sha256}, should be "
                    f"{checksums[shard.file]}"
                )
            if known.smallest < 0:
                raise _out_of_range(shard, known.smallest, accepted="0 and above")
            if vocab_size is not None and known.largest >= vocab_size:
                raise _out_of_range(shard, known.largest, accepted=f"0 to {vocab_size - 1}")
            largest = max(largest, known.largest)
    return largest


def known_of(shard: Shard, *, cache: Path) -> Known:
    """What is in a shard's file, from the cache or by reading it."""
    entry = _entry(shard, cache=cache)
    with suppress(OSError, ValueError, TypeError):
        return Known(**json.loads(entry.read_bytes()))
    known = _read(shard)
    remember(shard, known, cache=cache)
    return known


def remember(shard: Shard, known: Known, *, cache: Path) -> None:
    """Keep what is known of a shard's file as it is now. A cache that cannot be written is done without."""
    entry = _entry(shard, cache=cache)
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        unfinished = entry.with_name(f"{entry.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(known)))
        unfinished.replace(entry)


def _entry(shard: Shard, *, cache: Path) -> Path:
    known = shard.file.stat()
    named = f"{shard.file.resolve()}:{known.st_size}:{known.st_mtime_ns}:{shard.dtype}"
    return cache / "shards" / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json"


def _read(shard: Shard) -> Known:
    digest = hashlib.sha256()
    largest, smallest = 0, 0
    dtype = little_endian(shard.dtype)
    with shard.file.open("rb") as file:
        digest.update(file.read(shard.header))
        while block := file.read(BLOCK):
            digest.update(block)
            tokens = np.frombuffer(block, dtype=dtype)
            largest, smallest = max(largest, int(tokens.max())), min(smallest, int(tokens.min()))
    return Known(sha256=digest.hexdigest(), largest=largest, smallest=smallest)


def _out_of_range(shard: Shard, token: int, *, accepted: str) -> DataError:
    dtype = little_endian(shard.dtype)
    tokens = np.memmap(shard.file, dtype=dtype, mode="r", offset=shard.header)
    index = int(np.argmax(tokens == token))
    place = f"byte {shard.header + index * dtype.itemsize} (token {index})"
    return DataError(f"{shard.file} holds {token} at {place}; accepted tokens: {accepted}")
