"""Where documents begin and end within a micro-batch's sequences. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from stages.config.run_config import DataConfig
from stages.data.dataset import Corpus, Source, find_corpus
from stages.data.shards import Tokens

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MOST_WINDOWS = 1024
"""Most windows that the share of attention is estimated from."""
MOST_TOKENS = 1 << 22
"""Most tokens in these windows; one window is read however long it is."""


class Documents(NamedTuple):
    """The documents of a micro-batch `(batch, context)`, whose sequences are counted one after the other.

    Sizes do not depend on the number of documents: memory is allocated and blocks are compiled once.
    """

    positions: Tensor
    """Each token's position in its document, int32 `(batch, context)`."""
    ends: Tensor
    """Number of tokens before each document, and before its end, int32 `(batch * context + 1,)`; what follows
    the last end is as large."""
    bounds: Tensor
    """`ends` in host memory, int64, and behind them the number of documents."""


def documents_in(tokens: np.ndarray, *, end_of_document: int) -> tuple[np.ndarray, np.ndarray]:
    """`Documents.positions` and `Documents.bounds` of token ids `(batch, context)`.

    A document ends behind its end-of-document token, and at the end of a sequence.
    """
    import numpy as np

    batch, context = tokens.shape
    begins = np.ones(tokens.shape, dtype=bool)
    begins[:, 1:] = tokens[:, :-1] == end_of_document
    places = np.arange(context)
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    starts = np.flatnonzero(begins)
    bounds = np.full(batch * context + 2, batch * context, dtype=np.int64)
    bounds[: len(starts)] = starts
    bounds[-1] = len(starts)
    return positions.astype(np.int32), bounds


def attention_share(corpus: Corpus, *, context: int) -> float | None:
    """Share of the causal attention within sequences of `context` training tokens that is within documents,
    0..1; None if no token is known to end a document.

    The mean over up to 1,024 windows, spread evenly over the tokens; of a mixture, over as many of each
    source, by its share.
    """
    import numpy as np

    if corpus.end_of_document is None:
        return None
    tokens = Tokens(corpus.train)
    count = max(1, min(MOST_WINDOWS, MOST_TOKENS // context))
    share, first = 0.0, 0
    for source in corpus.sources or (Source(name="", share=1.0, tokens=len(tokens)),):
        attended = 0
        for start in np.linspace(first, first + source.tokens - context, count, dtype=np.int64):
            window = tokens.rows(np.array([start]), length=context)
            positions, _ = documents_in(window, end_of_document=corpus.end_of_document)
            attended += int(positions.sum()) + context
        share += source.share * (attended / (count * context * (context + 1) / 2))
        first += source.tokens
    return share


def computed_share(config: DataConfig) -> float:
    """Share of causal attention that a run computes, 0..1: 1 unless documents mask it.

    Raises:
        DataError: the data cannot be read.
    """
    if not config.document_mask:
        return 1.0
    mixture = tuple(config.sources.items()), tuple(config.weights.items())
    return _share(
        config.path, *mixture, config.end_of_document, config.validation_share, config.context, config.dtype
    )


@lru_cache
def _share(
    path: str | None,
    sources: tuple[tuple[str, str], ...],
    weights: tuple[tuple[str, float], ...],
    end_of_document: int | None,
    validation_share: float,
    context: int,
    dtype: str,
) -> float:
    config = DataConfig(
        path=path,
        sources=dict(sources),
        weights=dict(weights),
        end_of_document=end_of_document,
        validation_share=validation_share,
        dtype=dtype,
    )
    share = attention_share(find_corpus(config), context=context)
    return 1.0 if share is None else share
