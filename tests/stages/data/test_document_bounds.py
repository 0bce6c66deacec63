"""Boundaries of documents in sequences, against a loop over the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stages.data.dataset import Corpus
from stages.data.documents import attention_share, documents_in
from stages.data.shards import Shard

END = 3


def documents_of(sequence: list[int]) -> list[int]:
    """Lengths of a sequence's documents."""
    lengths = [0]
    for place, token in enumerate(sequence):
        lengths[-1] += 1
        if token == END and place + 1 < len(sequence):
            lengths.append(0)
    return lengths


@pytest.mark.parametrize("context", [1, 2, 7, 40])
def test_documents_end_behind_their_last_token_and_at_the_end_of_a_sequence(context: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 6, size=(5, context))
    positions, bounds = documents_in(tokens, end_of_document=END)
    lengths = [length for sequence in tokens.tolist() for length in documents_of(sequence)]
    assert positions.flatten().tolist() == [place for length in lengths for place in range(length)]
    assert bounds[-1] == len(lengths)
    assert np.diff(bounds[: len(lengths) + 1]).tolist() == lengths
    assert (bounds[len(lengths) : -1] == tokens.size).all()


def test_the_share_of_attention_is_that_of_the_pairs_of_tokens(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 20, size=90).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens")
    shards = tuple(
        Shard(file=tmp_path / "tokens", dtype="uint16", tokens=30, first=first) for first in (0, 30, 60)
    )
    corpus = Corpus(
        train=shards,
        validation=shards,
        bytes_per_token=None,
        unigram_bits_per_byte=None,
        sha256="",
        end_of_document=END,
    )
    context = 8
    # More windows than places: each of these is read equally often, but for the rounding of their starts.
    starts = np.linspace(0, 90 - context, 1024, dtype=np.int64)
    pairs = [
        sum(length * (length + 1) // 2 for length in documents_of(tokens[start : start + context].tolist()))
        for start in starts
    ]
    expected = sum(pairs) / len(pairs) / (context * (context + 1) / 2)
    assert 0 < expected < 1
    assert attention_share(corpus, context=context) == pytest.approx(expected, rel=1e-12)
    assert attention_share(replace(corpus, end_of_document=None), context=context) is None
