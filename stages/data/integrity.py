"""Checksums and token ranges of token shards, which need all of a file to be read.

Results are cached in the user's cache folder by the file's size and modification time, in JSON files that
carry a checksum of their content: one that is torn or altered reads as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stages.data.shards import DataError, Shard, little_endian

CHECKSUM_KEY = "sha256_of_the_rest"
_MARGIN = 22.0
"""Seconds: clocks of filesystems are coarse (2), and another machine's may differ from this one's (20)."""


def identifies(modified: float) -> bool:
    """Whether a file's modification time (seconds since 1970) identifies its content: no change of it from
    now on can have the same time."""
    return abs(time.time() - modified) > _MARGIN


def checksum_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object without its checksum, independent of its layout in a file."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_checksummed(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file atomically, after its content is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as opened:
            json.dump({**content, CHECKSUM_KEY: checksum_of(content)}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(file)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_checksummed(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it is missing, unreadable, or does not match its checksum."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get(CHECKSUM_KEY) != checksum_of(content):
        return None
    return content


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk, where the filesystem can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
