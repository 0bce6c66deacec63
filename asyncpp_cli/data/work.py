"""What one process does: a part of the inputs into a shard of each split, and a record of what is in them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from asyncpp_cli.data.documents import documents, is_held_out
from asyncpp_cli.data.parts import Part
from asyncpp_cli.data.tokenizers import BATCH, Bytes, Library, Tokenizer
from asyncpp_cli.files import write_json
from stages.prepared import SPLITS, UNFINISHED
from stages.shards import dtype_for


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the tokens, beside the inputs."""

    tokenizer: str
    """Its name, or how it was to be trained."""
    tokenizer_sha256: str | None
    end_of_document: int
    field: str
    separator: str
    validation_share: float


@dataclass(kw_only=True)
class Split:
    """What a part holds of one split."""

    file: str = ""
    """Empty where there is nothing."""
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of text, without ends of documents."""
    sha256: str = ""
    largest: int = 0
    """Token."""
    byte_counts: list[int] = field(default_factory=lambda: [0] * 256)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of a part."""

    number: int
    splits: dict[str, Split]


def record_file(out: Path, number: int) -> Path:
    return out / UNFINISHED / f"{number:06}.json"


def finished(out: Path, number: int, *, width: int) -> Record | None:
    """The record of a part whose shards are complete, else None.

    Args:
        width: bytes of a token.
    """
    try:
        content = json.loads(record_file(out, number).read_bytes())
        record = Record(
            number=number, splits={name: Split(**known) for name, known in content["splits"].items()}
        )
        whole = all(
            not split.file or (out / split.file).stat().st_size == split.tokens * width
            for split in record.splits.values()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if whole else None


def tokenize(part: Part, *, settings: Settings, tokenizer: Tokenizer, out: Path) -> Record:
    """Write a part's shards into `out`, then its record.

    Raises:
        UserError: the text is not what it should be.
    """
    dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    splits = {name: Split() for name in SPLITS}
    counts = {name: np.zeros(256, dtype=np.int64) for name in SPLITS}
    with ExitStack() as opened:
        shards = {
            name: opened.enter_context(_Shard(out, f"{name}-{part.number:06}.bin", split))
            for name, split in splits.items()
        }
        for batch in _batches(part, settings):
            for document, tokens in zip(batch, tokenizer.encode(batch), strict=True):
                name = SPLITS[is_held_out(document, share=settings.validation_share)]
                shards[name].write(tokens.astype(dtype, copy=False), end)
                splits[name].documents += 1
                splits[name].bytes += len(document)
                counts[name] += np.bincount(np.frombuffer(document, dtype=np.uint8), minlength=256)
        for name, shard in shards.items():
            shard.finish()
            splits[name].byte_counts = counts[name].tolist()
    record = Record(number=part.number, splits=splits)
    write_json(record_file(out, part.number), asdict(record))
    return record


def _batches(part: Part, settings: Settings) -> Iterator[list[bytes]]:
    """The documents of a part, as many at a time as the tokenizer is given at once."""
    batch: list[bytes] = []
    size = 0
    for piece in part.pieces:
        for document in documents(piece, field=settings.field, separator=settings.separator):
            batch.append(document)
            size += len(document)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _Shard:
    """A shard that is being written, document by document: it is in the folder once it is whole."""

    def __init__(self, out: Path, name: str, split: Split) -> None:
        self._path = out / name
        self._unfinished = out / UNFINISHED / f"{name}.{os.getpid()}"
        self._split = split
        self._digest = hashlib.sha256()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._unfinished.unlink(missing_ok=True)

    def write(self, *pieces: np.ndarray) -> None:
        if self._file is None:
            self._file = self._unfinished.open("wb")
        for tokens in pieces:
            self._file.write(tokens.data)
            self._digest.update(tokens.data)
            self._split.tokens += len(tokens)
            self._split.largest = max(self._split.largest, int(tokens.max(initial=0)))

    def finish(self) -> None:
        """Put the shard into the folder, if it holds anything."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._unfinished.replace(self._path)
        self._split.file, self._split.sha256 = self._path.name, self._digest.hexdigest()


_here: dict[str, Any] = {}


def begin(tokenizer: str | None, settings: Settings, out: Path, name: str, end: str | None) -> None:
    """Make a process ready for `tokenize_here`; it ends when the one that started it does.

    Args:
        tokenizer: content of the tokenizer.json; None: bytes.
        settings: of the work.
        out: the prepared folder.
        name: the tokenizer's, for people.
        end: its end-of-document token, if the user named it.
    """
    # One thread a process: there are as many processes as cores. Read when the library is first used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["POLARS_MAX_THREADS"] = "1"
    _here["settings"], _here["out"] = settings, out
    _here["tokenizer"] = Bytes() if tokenizer is None else Library(tokenizer, name=name, end=end)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def tokenize_here(part: Part) -> Record:
    """`tokenize` with what `begin` has made ready."""
    return tokenize(part, settings=_here["settings"], tokenizer=_here["tokenizer"], out=_here["out"])
