"""Checksums and token ranges of token shards, which need all of a file to be read.

Results are cached in the user's cache folder by the file's size and modification time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from stages.data.checksummed_json import identifies, read_checksummed, write_checksummed
from stages.data.shards import DataError, Shard, little_endian

BLOCK = 1 << 22
THREADS = 4


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """Checksum and token range of a shard's file."""

    sha256: str
    largest: int
    """Largest token."""
    smallest: int
    """Smallest token."""


def check_shards(
    shards: Iterable[Shard], *, checksums: Mapping[Path, str], vocab_size: int | None, cache: Path | None
) -> int:
    """Check the shards, reading those that are not in the cache; returns the largest token.

    Args:
        shards: of any format.
        checksums: expected SHA-256 of files; others are not checked.
        vocab_size: exclusive upper bound of tokens; None: no bound.
        cache: folder of the cache, if any.

    Raises:
        DataError: a file does not match its checksum, or contains a token out of range.
    """
    largest = 0
    for shard, facts in _inspect_all(shards, cache=cache):
        if shard.file in checksums and checksums[shard.file] != facts.sha256:
            raise DataError(
                f"{shard.file} is not what its manifest says: SHA-256 is {facts.sha256}, should be "
                f"{checksums[shard.file]}"
            )
        if facts.smallest < 0:
            raise _out_of_range(shard, facts.smallest, accepted="0 and above")
        if vocab_size is not None and facts.largest >= vocab_size:
            raise _out_of_range(shard, facts.largest, accepted=f"0 to {vocab_size - 1}")
        largest = max(largest, facts.largest)
    return largest


def checksums_of(shards: Iterable[Shard], *, cache: Path | None) -> dict[Path, str]:
    """SHA-256 of each shard's file, read completely the first time."""
    return {shard.file: facts.sha256 for shard, facts in _inspect_all(shards, cache=cache)}


def _inspect_all(shards: Iterable[Shard], *, cache: Path | None) -> list[tuple[Shard, ShardFacts]]:
    by_file = {shard.file: shard for shard in shards}
    with ThreadPoolExecutor(THREADS) as pool:
        facts = list(pool.map(lambda shard: inspect_shard(shard, cache=cache), by_file.values()))
    return list(zip(by_file.values(), facts, strict=True))


def inspect_shard(shard: Shard, *, cache: Path | None) -> ShardFacts:
    """Checksum and token range of a shard's file, from the cache or by reading it."""
    if cache is not None and (content := read_checksummed(_entry(shard, cache=cache))) is not None:
        with suppress(KeyError):
            return ShardFacts(**{entry.name: content[entry.name] for entry in fields(ShardFacts)})
    modified = shard.file.stat().st_mtime
    facts = _read(shard)
    if identifies(modified):
        cache_facts(shard, facts, cache=cache)
    return facts


def cache_facts(shard: Shard, facts: ShardFacts, *, cache: Path | None) -> None:
    """Cache the facts of a shard's file as it is now, if the cache can be written."""
    if cache is None:
        return
    with suppress(OSError):
        entry = _entry(shard, cache=cache)
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_checksummed(entry, asdict(facts))


def _entry(shard: Shard, *, cache: Path) -> Path:
    stat = shard.file.stat()
    key = f"{shard.file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{shard.dtype}"
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    return cache / "shards" / f"{digest[:32]}.sealed.json"


def _read(shard: Shard) -> ShardFacts:
    import numpy as np

    digest = hashlib.sha256()
    largest, smallest = 0, 0
    dtype = little_endian(shard.dtype)
    with shard.file.open("rb") as file:
        digest.update(file.read(shard.header))
        while block := file.read(BLOCK):
            digest.update(block)
            tokens = np.frombuffer(block, dtype=dtype)
            largest, smallest = max(largest, int(tokens.max())), min(smallest, int(tokens.min()))
    return ShardFacts(sha256=digest.hexdigest(), largest=largest, smallest=smallest)


def _out_of_range(shard: Shard, token: int, *, accepted: str) -> DataError:
    import numpy as np

    dtype = little_endian(shard.dtype)
    tokens = np.memmap(shard.file, dtype=dtype, mode="r", offset=shard.header)
    index = int(np.argmax(tokens == token))
    place = f"byte {shard.header + index * dtype.itemsize} (token {index})"
    return DataError(f"{shard.file} holds {token} at {place}; accepted tokens: {accepted}")
