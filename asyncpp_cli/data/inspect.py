"""`asyncpp data inspect`: counts and decoded samples of token shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncpp_cli.base.console import show_table, tell
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.data.options import InspectOptions
from asyncpp_cli.data.tokenizers import Bytes, Library, Tokenizer, read_tokenizer, recorded_text
from stages.config.run_config import DataConfig
from stages.data.dataset import is_prepared, prepare
from stages.data.foreign_formats import find_shards
from stages.data.prepared import MANIFEST, Prepared, read_prepared
from stages.data.shards import DataError, Shard, Tokens, count

SAMPLE_TOKENS = 48
"""Length of a sample."""


def show_shards(path: Path, options: InspectOptions) -> None:
    """Print counts and samples of both splits.

    Args:
        path: a prepared folder, or token shards of another project.
        options: of the command.

    Raises:
        UserError: there are no shards, they are damaged, or they cannot be decoded.
    """
    try:
        prepared = read_prepared(path) if is_prepared(path) else None
        if prepared is None and not find_shards(path):
            raise UserError(f"{path} holds no {MANIFEST} and no .bin files; inspect reads token shards")
        corpus = prepare(DataConfig(path=str(path), context=1, dtype=options.dtype))
    except DataError as error:
        raise UserError(str(error)) from error
    decoder = _decoder(prepared, options.tokenizer)
    splits = [("train", corpus.train), ("validation", corpus.validation)]
    drawn = {split: _samples(shards, samples=options.samples, seed=options.seed) for split, shards in splits}
    tokens_shown = [token for rows in drawn.values() for _, tokens in rows for token in tokens]
    if decoder and (beyond := [token for token in tokens_shown if not 0 <= token < decoder.vocab_size]):
        raise UserError(
            f"{path} has token {beyond[0]}, and {decoder.name} has 0 to {decoder.vocab_size - 1}; accepted: "
            "the --tokenizer that made the tokens, or none"
        )
    if options.as_json:
        if prepared is not None and options.verify:
            _verify(prepared)
        print(json.dumps(_record(prepared, splits, drawn, decoder), indent=1))
        return
    if prepared is not None:
        _show_prepared(prepared)
        if options.verify:
            print(_verify(prepared))
    else:
        rows = [[split, f"{count(shards):,}", str(len(shards))] for split, shards in splits]
        show_table(["split", "tokens", "shards"], rows, title=f"{path}: tokens of another project's format")
    for split, _ in splits:
        for position, tokens in drawn[split]:
            text = decoder.decode(tokens) if decoder is not None else " ".join(map(str, tokens))
            tell(f"\n{split}, token {position:,}:\n{text}")


def _record(
    prepared: Prepared | None,
    splits: Sequence[tuple[str, Sequence[Shard]]],
    drawn: Mapping[str, Sequence[tuple[int, list[int]]]],
    decoder: Tokenizer | None,
) -> dict[str, Any]:
    """Counts and samples for programs; null where the format does not say."""
    return {
        "tokenizer": None if prepared is None else prepared.tokenizer,
        "vocab_size": None if prepared is None else prepared.vocab_size,
        "end_of_document": None if prepared is None else prepared.end_of_document,
        "splits": {
            split: {
                "documents": None if prepared is None else prepared.documents[split],
                "tokens": count(shards),
                "bytes": None if prepared is None else prepared.bytes[split],
                "shards": len(shards),
                "samples": [
                    {
                        "position": position,
                        "tokens": tokens,
                        "text": None if decoder is None else decoder.decode(tokens),
                    }
                    for position, tokens in drawn[split]
                ],
            }
            for split, shards in splits
        },
    }


def _decoder(prepared: Prepared | None, tokenizer: str | None) -> Tokenizer | None:
    if tokenizer is not None:
        return read_tokenizer(tokenizer, end=None)
    if prepared is None:
        return None
    if prepared.tokenizer_file is None:
        return Bytes()
    return Library(recorded_text(prepared), name=prepared.tokenizer, end=prepared.end_of_document)


def _show_prepared(prepared: Prepared) -> None:
    rows = []
    for split, shards in prepared.splits.items():
        tokens, size = count(shards), prepared.bytes[split]
        bytes_per_token = f"{size / tokens:.3f}" if tokens else "-"
        documents = f"{prepared.documents[split]:,}"
        rows.append([split, documents, f"{tokens:,}", f"{size:,}", bytes_per_token, str(len(shards))])
    show_table(
        ["split", "documents", "tokens", "bytes", "bytes/token", "shards"],
        rows,
        title=f"{prepared.folder}: {prepared.tokenizer}, {prepared.vocab_size:,} tokens "
        f"(model.vocab_size: {prepared.vocab_size} or more), {prepared.end_of_document} ends a document",
    )


def _verify(prepared: Prepared) -> str:
    """Check the checksums; returns what to say of them."""
    for file, expected in prepared.checksums.items():
        with file.open("rb") as opened:
            checksum = hashlib.file_digest(opened, "sha256").hexdigest()
        if checksum != expected:
            raise UserError(f"{file}: SHA-256 is {checksum}, {MANIFEST} says {expected}")
    return f"{len(prepared.checksums)} files match the checksums of {MANIFEST}"


def _samples(shards: Sequence[Shard], *, samples: int, seed: int) -> list[tuple[int, list[int]]]:
    tokens = Tokens(shards)
    length = min(SAMPLE_TOKENS, len(tokens))
    positions = np.sort(np.random.default_rng(seed).integers(0, len(tokens) - length + 1, size=samples))
    rows = tokens.rows(positions, length=length)
    return list(zip(positions.tolist(), rows.tolist(), strict=True))
