"""`asyncpp data inspect`: what is in token shards, and what it reads like."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyncpp_cli.console import show_table
from asyncpp_cli.data.tokenizers import Bytes, Tokenizer, read_tokenizer
from asyncpp_cli.errors import UserError
from stages.config import DataConfig
from stages.corpus import is_prepared, prepare
from stages.foreign_shards import find_shards
from stages.prepared import MANIFEST, Prepared, read_prepared
from stages.shards import DataError, Shard, Tokens, count

SAMPLE_TOKENS = 48


def inspect(path: Path, *, samples: int, seed: int, tokenizer: str | None, verify: bool) -> None:
    """Show counts, and samples of both splits, on standard output.

    Args:
        path: a prepared folder, or token shards of another project.
        samples: of each split.
        seed: of where they are taken from.
        tokenizer: to decode with; None: the prepared folder's own.
        verify: whether to hold every file against its checksum.

    Raises:
        UserError: there are no shards, they are damaged, or they cannot be decoded.
    """
    try:
        prepared = read_prepared(path) if is_prepared(path) else None
        if prepared is None and not find_shards(path):
            raise UserError(f"{path} holds no {MANIFEST} and no .bin files; inspect reads token shards")
        corpus = prepare(DataConfig(path=str(path), context=1))
    except DataError as error:
        raise UserError(str(error)) from error
    decoder = _decoder(prepared, tokenizer)
    if prepared is not None:
        _show_prepared(prepared)
        if verify:
            _verify(prepared)
    else:
        rows = [
            [split, f"{count(shards):,}", str(len(shards))]
            for split, shards in _splits(corpus.train, corpus.validation)
        ]
        show_table(["split", "tokens", "shards"], rows, title=f"{path}: tokens of another project's format")
    for split, shards in _splits(corpus.train, corpus.validation):
        for place, tokens in _samples(shards, samples=samples, seed=seed):
            shown = decoder.decode(tokens) if decoder is not None else " ".join(map(str, tokens))
            print(f"\n{split}, token {place:,}:\n{_printable(shown)}")


def _splits(*shards: Sequence[Shard]) -> list[tuple[str, Sequence[Shard]]]:
    return list(zip(("train", "validation"), shards, strict=True))


def _decoder(prepared: Prepared | None, tokenizer: str | None) -> Tokenizer | None:
    if tokenizer is not None:
        return read_tokenizer(tokenizer, end=None)
    if prepared is None:
        return None
    if prepared.tokenizer_file is None:
        return Bytes()
    try:
        found = hashlib.sha256(prepared.tokenizer_file.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{prepared.tokenizer_file} cannot be read ({error.strerror})") from error
    if found != prepared.tokenizer_sha256:
        raise UserError(
            f"{prepared.tokenizer_file} is not the tokenizer that {MANIFEST} names: SHA-256 is {found}"
        )
    return read_tokenizer(str(prepared.tokenizer_file), end=None)


def _show_prepared(prepared: Prepared) -> None:
    rows = []
    for split, shards in prepared.splits.items():
        tokens, size = count(shards), prepared.bytes[split]
        each = f"{size / tokens:.3f}" if tokens else "-"
        documents = f"{prepared.documents[split]:,}"
        rows.append([split, documents, f"{tokens:,}", f"{size:,}", each, str(len(shards))])
    show_table(
        ["split", "documents", "tokens", "bytes", "bytes/token", "shards"],
        rows,
        title=f"{prepared.folder}: {prepared.tokenizer}, {prepared.vocab_size:,} tokens "
        f"(model.vocab_size: {prepared.vocab_size} or more), {prepared.end_of_document} ends a document",
    )


def _verify(prepared: Prepared) -> None:
    for file, expected in prepared.checksums.items():
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != expected:
            raise UserError(f"{file}: SHA-256 is {found}, {MANIFEST} says {expected}")
    print(f"{len(prepared.checksums)} files are what {MANIFEST} says")


def _samples(shards: Sequence[Shard], *, samples: int, seed: int) -> list[tuple[int, list[int]]]:
    tokens = Tokens(shards)
    length = min(SAMPLE_TOKENS, len(tokens))
    places = np.sort(np.random.default_rng(seed).integers(0, len(tokens) - length + 1, size=samples))
    rows = tokens.rows(places, length=length)
    return list(zip(places.tolist(), rows.tolist(), strict=True))


def _printable(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)
