"""Tokenizes a part of the inputs in one process: writes a shard for each split and a record of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import numpy as np

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.worker import exit_with_parent
from asyncpp_cli.data.documents import Document, documents, is_held_out
from asyncpp_cli.data.parts import InputPart
from asyncpp_cli.data.tokenizers import BATCH, Bytes, Library, Tokenizer
from stages.data.prepared import SPLITS
from stages.data.shards import dtype_for
from stages.data.text import byte_counts


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings that, with the inputs, determine the tokens."""

    tokenizer: str
    """Name of the tokenizer."""
    tokenizer_sha256: str | None
    end_of_document: int
    start_of_document: int | None
    field: str
    separator: str
    validation_share: float
    hashes_held_out: float
    """Share of all hashes whose documents are held out."""


@dataclass(kw_only=True)
class PartSplit:
    """The content of a part's shard of one split."""

    file: str = ""
    """Name of the shard; empty if there is none."""
    documents: int = 0
    tokens: int = 0
    changed: int = 0
    """Documents whose tokens do not decode to their text."""
    bytes: int = 0
    """Bytes of text that decoding its tokens gives back, without end-of-document tokens."""
    sha256: str = ""
    largest: int = 0
    """Largest token."""
    byte_counts: list[int] = field(default_factory=lambda: [0] * 256)


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """The content of a part's shards."""

    number: int
    splits: dict[str, PartSplit]
    separators: int = 0
    """Times that the separator stands within a line of text, where it ends no document."""
    example: str = ""
    """Where tokens of a document first do not decode to its text, for messages; empty: nowhere."""


def tokenize(part: InputPart) -> PartRecord:
    """Write a part's shards into the folder that `start_worker` was given.

    Raises:
        UserError: the input is not valid.
    """
    settings: ShardSettings = _worker_state["settings"]
    tokenizer: Tokenizer = _worker_state["tokenizer"]
    out: Path = _worker_state["out"]
    dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
    start, end = settings.start_of_document, np.array([settings.end_of_document], dtype=dtype)
    before = np.array([] if start is None else [start], dtype=dtype)
    splits = {name: PartSplit() for name in SPLITS}
    counts = {name: np.zeros(256, dtype=np.int64) for name in SPLITS}
    mark, separators, example = settings.separator.strip().encode(), 0, ""
    with ExitStack() as opened:
        shards = {
            name: _Shard(out / f"{name}-{part.number:06}.bin", split, opened)
            for name, split in splits.items()
        }
        for batch in _batches(part, settings):
            encoded = tokenizer.encode([document.text for document in batch])
            for whole, tokens, decoded in zip(batch, encoded, tokenizer.given_back(encoded), strict=True):
                document, piece, _ = whole
                _check_text(whole, tokens, tokenizer)
                name = SPLITS[is_held_out(document, share=settings.hashes_held_out)]
                if piece.source.kind == "text" and mark:
                    separators += document.count(mark)
                shards[name].write(before, tokens.astype(dtype, copy=False), end)
                splits[name].documents += 1
                kept = byte_counts(document)
                if decoded != document:
                    splits[name].changed += 1
                    kept = np.minimum(kept, byte_counts(decoded))
                    example = example or _difference(whole, decoded)
                counts[name] += kept
        for name, shard in shards.items():
            shard.finish()
            splits[name].byte_counts = counts[name].tolist()
            splits[name].bytes = int(counts[name].sum())
    return PartRecord(number=part.number, splits=splits, separators=separators, example=example)


def _difference(document: Document, decoded: bytes) -> str:
    """Where a document's text and what its tokens decode to first differ, in words."""
    text, back = document.text.decode(), decoded.decode()
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, back, strict=False)))
    around = slice(max(0, same - 10), same + 20)
    return f"{document}: {text[around]!r} becomes {back[around]!r}"


def _check_text(document: Document, tokens: np.ndarray, tokenizer: Tokenizer) -> None:
    """Check that a document's text has none of the tokens that begin and end documents.

    Raises:
        UserError: names the document.
    """
    for token in (tokenizer.start_of_document, tokenizer.end_of_document):
        if token is not None and (places := np.flatnonzero(tokens == token)).size:
            before = tokenizer.decode(tokens[max(0, places[0] - 20) : places[0]].tolist())
            raise UserError(
                f"{document}: {tokenizer.decode([token])!r} behind {before[-20:]!r} is token {token}, which "
                "begins or ends documents; accepted: text without it, or another --tokenizer"
            )


def _batches(part: InputPart, settings: ShardSettings) -> Iterator[list[Document]]:
    """The documents of a part in batches of about `BATCH` bytes."""
    batch: list[Document] = []
    size = 0
    for piece in part.pieces:
        for document in documents(piece, field=settings.field, separator=settings.separator):
            batch.append(document)
            size += len(document.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _Shard:
    """Writes a shard document by document; `opened` closes its file."""

    def __init__(self, path: Path, split: PartSplit, opened: ExitStack) -> None:
        self._path, self._split, self._opened = path, split, opened
        self._digest = hashlib.sha256()
        self._file: IO[bytes] | None = None

    def write(self, *pieces: np.ndarray) -> None:
        if self._file is None:
            self._file = self._opened.enter_context(self._path.open("wb"))
        for tokens in pieces:
            self._file.write(tokens.data)
            self._digest.update(tokens.data)
            self._split.tokens += len(tokens)
            self._split.largest = max(self._split.largest, int(tokens.max(initial=0)))

    def finish(self) -> None:
        """Flush the shard to disk; an empty one has no file."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._split.file, self._split.sha256 = self._path.name, self._digest.hexdigest()


_worker_state: dict[str, Any] = {}


def start_worker(
    tokenizer: str | None, settings: ShardSettings, out: Path, name: str, end: str | None
) -> None:
    """Set up a process for `tokenize`; it exits with its parent.

    Args:
        tokenizer: content of the tokenizer.json; None: bytes.
        settings: determine the tokens.
        out: the prepared folder.
        name: the tokenizer's name, for messages.
        end: end-of-document token, if the user named one.
    """
    # One thread per process, since there is a process per core. Read when the libraries are first used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["POLARS_MAX_THREADS"] = "1"
    _worker_state["settings"], _worker_state["out"] = settings, out
    _worker_state["tokenizer"] = Bytes() if tokenizer is None else Library(tokenizer, name=name, end=end)
    exit_with_parent()
