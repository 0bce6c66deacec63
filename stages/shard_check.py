"""Reading token shards whole, once: their checksums and their largest token.

What was found is kept in the user's cache folder, by the file's size and time of change, so that a second
look at the same file costs nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from stages.sealed import TICK, read_sealed, write_sealed
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
    shards: Iterable[Shard], *, checksums: Mapping[Path, str], vocab_size: int | None, cache: Path | None
) -> int:
    """Read every shard that has not been read before. The largest token there is.

    Args:
        shards: of any format.
        checksums: what the SHA-256 of some files must be.
        vocab_size: tokens must be below it; None: whatever there is goes.
        cache: where the findings are kept, if anywhere.

    Raises:
        DataError: a file is not what its checksum says, or holds a token out of range.
    """
    largest = 0
    for shard, known in _all_known(shards, cache=cache):
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


def checksums_of(shards: Iterable[Shard], *, cache: Path | None) -> dict[Path, str]:
    """SHA-256 of each shard's file, read whole the first time."""
    return {shard.file: known.sha256 for shard, known in _all_known(shards, cache=cache)}


def _all_known(shards: Iterable[Shard], *, cache: Path | None) -> list[tuple[Shard, Known]]:
    by_file = {shard.file: shard for shard in shards}
    with ThreadPoolExecutor(THREADS) as pool:
        known = list(pool.map(lambda shard: known_of(shard, cache=cache), by_file.values()))
    return list(zip(by_file.values(), known, strict=True))


def known_of(shard: Shard, *, cache: Path | None) -> Known:
    """What is in a shard's file, from the cache or by reading it."""
    if cache is not None and (content := read_sealed(_entry(shard, cache=cache))) is not None:
        with suppress(KeyError):
            return Known(**{entry.name: content[entry.name] for entry in fields(Known)})
    stands_since = shard.file.stat().st_mtime
    known = _read(shard)
    if time.time() - stands_since > TICK:
        remember(shard, known, cache=cache)
    return known


def remember(shard: Shard, known: Known, *, cache: Path | None) -> None:
    """Keep what is known of a shard's file as it is now. A cache that cannot be written is done without."""
    if cache is None:
        return
    with suppress(OSError):
        entry = _entry(shard, cache=cache)
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(entry, asdict(known))


def _entry(shard: Shard, *, cache: Path) -> Path:
    known = shard.file.stat()
    named = f"{shard.file.resolve()}:{known.st_size}:{known.st_mtime_ns}:{shard.dtype}"
    digest = hashlib.sha256(named.encode(errors="surrogateescape")).hexdigest()
    return cache / "shards" / f"{digest[:32]}.sealed.json"


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
