"""The manifest of a prepared folder (docs/data.md describes its keys)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.data.tokenizers import Tokenizer, sha256_of
from asyncpp_cli.data.worker import PartRecord
from stages.data.prepared import FORMAT, SPLITS
from stages.data.shards import dtype_for
from stages.data.text import entropy


def manifest(
    records: Sequence[PartRecord], *, tokenizer: Tokenizer, file: str, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest's content for the shards of all parts, in order.

    If no document was held out by chance, the end of the last shards is held out.

    Args:
        records: one for each part.
        tokenizer: that produced the tokens.
        file: name of the tokenizer's copy in the folder.
        plan: settings and inputs of the folder.

    Raises:
        UserError: the inputs hold no text.
    """
    splits = {name: _split(records, name) for name in SPLITS}
    counts = sum(np.asarray(record.splits["validation"].byte_counts) for record in records)
    if not any(split["tokens"] for split in splits.values()):
        raise UserError("the inputs hold no text")
    if not splits["validation"]["tokens"]:
        share = float(plan["settings"]["validation_share"])
        splits = _hold_out_end(splits["train"], share=share)
        counts = sum(np.asarray(record.splits["train"].byte_counts) for record in records)
    return {
        "format": FORMAT,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype_for(tokenizer.vocab_size),
        "tokenizer": {
            "name": tokenizer.name,
            "file": file if tokenizer.text is not None else None,
            "sha256": sha256_of(tokenizer),
            "end_of_document": tokenizer.end_of_document,
            "start_of_document": tokenizer.start_of_document,
        },
        "unigram_bits_per_byte": entropy(np.asarray(counts)),
        "splits": splits,
        "made_from": dict(plan),
    }


def _split(records: Sequence[PartRecord], name: str) -> dict[str, Any]:
    parts = [record.splits[name] for record in records if record.splits[name].file]
    return {
        "documents": sum(part.documents for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "bytes": sum(part.bytes for part in parts),
        "shards": [{"file": part.file, "tokens": part.tokens, "sha256": part.sha256} for part in parts],
    }


def _hold_out_end(train: Mapping[str, Any], *, share: float) -> dict[str, dict[str, Any]]:
    """Divide a split in two at a token; bytes are divided in proportion."""
    tokens = train["tokens"]
    kept = tokens - max(1, round(tokens * share))
    splits = {
        "train": {**train, "tokens": kept, "bytes": train["bytes"] * kept // tokens, "shards": []},
        "validation": {
            "documents": 0,
            "tokens": tokens - kept,
            "bytes": train["bytes"] - train["bytes"] * kept // tokens,
            "shards": [],
        },
    }
    before = 0
    for shard in train["shards"]:
        kept_here = min(shard["tokens"], max(0, kept - before))
        before += shard["tokens"]
        if kept_here:
            splits["train"]["shards"].append({**shard, "tokens": kept_here})
        if kept_here < shard["tokens"]:
            rest = {**shard, "first": kept_here, "tokens": shard["tokens"] - kept_here}
            splits["validation"]["shards"].append(rest)
    return splits
