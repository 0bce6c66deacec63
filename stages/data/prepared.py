"""Reader of the folder that `asyncpp data prepare` writes: token shards and a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.data.shards import DataError, Shard, dtype_for, little_endian

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
FEW_DOCUMENTS = 20
"""Least number of documents of a validation split that is not remarked on."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The manifest of a prepared folder."""

    folder: Path
    splits: Mapping[str, tuple[Shard, ...]]
    """Shards by split, in order."""
    documents: Mapping[str, int]
    """Number of documents by split."""
    bytes: Mapping[str, int]
    """Bytes of text by split."""
    checksums: Mapping[Path, str]
    """SHA-256 of each file."""
    vocab_size: int
    end_of_document: int
    start_of_document: int | None
    """Token that begins each document; None: documents begin with their text."""
    tokenizer: str
    """Name of the tokenizer, for display."""
    tokenizer_file: Path | None
    """Hugging Face `tokenizer.json`; None: tokens are bytes."""
    tokenizer_sha256: str | None
    unigram_bits_per_byte: float

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes of validation text per token."""
        tokens = sum(shard.tokens for shard in self.splits["validation"])
        return self.bytes["validation"] / tokens if tokens else 0.0


def read_prepared(folder: Path) -> Prepared:
    """Read a prepared folder's manifest and check the files' sizes against it.

    Raises:
        DataError: the manifest or a shard is missing, damaged or truncated.
    """
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_bytes())
        if _count(content["format"]) > FORMAT:
            raise DataError(f"{file} has format {content['format']}: a newer asyncpp wrote it")
        return _read(folder, content)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from error
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file} is no manifest of prepared data ({type(error).__name__}: {error})"
        ) from error


def few_documents(prepared: Prepared) -> str:
    """A remark on a validation split of so few documents that they decide the loss; empty if it has more."""
    documents = prepared.documents["validation"]
    if documents >= FEW_DOCUMENTS:
        return ""
    ways = "a larger --validation-share, or " * (documents < prepared.documents["train"])
    ways += "more and shorter documents (--separator)"
    return (
        f"the validation split of {prepared.folder} has {documents} document{'s' * (documents != 1)}, so its "
        f"loss depends on which ones; {ways} give {FEW_DOCUMENTS} or more"
    )


def _read(folder: Path, content: Mapping[str, Any]) -> Prepared:
    vocab_size, dtype = _count(content["vocab_size"], least=1), str(content["dtype"])
    if dtype != dtype_for(vocab_size):
        raise DataError(
            f"{folder / MANIFEST}: dtype is {dtype!r}; {vocab_size} tokens take {dtype_for(vocab_size)}"
        )
    width = little_endian(dtype).itemsize
    splits: dict[str, tuple[Shard, ...]] = {}
    checksums: dict[Path, str] = {}
    ends: dict[Path, int] = {}
    for split in SPLITS:
        shards = []
        for entry in content["splits"][split]["shards"]:
            path = folder / Path(entry["file"]).name
            shard = Shard(
                file=path,
                dtype=dtype,
                first=_count(entry.get("first", 0)),
                tokens=_count(entry["tokens"], least=1),
            )
            shards.append(shard)
            ends[path] = max(ends.get(path, 0), (shard.first + shard.tokens) * width)
            checksums[path] = str(entry["sha256"])
        splits[split] = tuple(shards)
    for path, expected in ends.items():
        if not path.is_file():
            raise DataError(f"{path} is missing; {MANIFEST} beside it names it")
        if (size := path.stat().st_size) != expected:
            raise DataError(
                f"{path} is truncated or damaged: it has {size} bytes, {MANIFEST} says {expected}"
            )
    tokenizer = content["tokenizer"]
    return Prepared(
        folder=folder,
        splits=splits,
        documents={split: _count(content["splits"][split]["documents"]) for split in SPLITS},
        bytes={split: _count(content["splits"][split]["bytes"]) for split in SPLITS},
        checksums=checksums,
        vocab_size=vocab_size,
        end_of_document=_count(tokenizer["end_of_document"]),
        start_of_document=None if (start := tokenizer.get("start_of_document")) is None else _count(start),
        tokenizer=str(tokenizer["name"]),
        tokenizer_file=folder / Path(tokenizer["file"]).name if tokenizer["file"] is not None else None,
        tokenizer_sha256=tokenizer["sha256"],
        unigram_bits_per_byte=float(content["unigram_bits_per_byte"]),
    )


def _count(value: Any, *, least: int = 0) -> int:
    """A manifest's value as a count."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise ValueError(f"{value!r} is no count of {least} or more")
    return value
