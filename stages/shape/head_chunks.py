"""Where the head and the loss are computed in chunks of rows. Imports no torch.

Whole logits are the largest tensor of a run: 4 GB in float32 at 8,192 tokens and a vocabulary of 128k, and as
much again for their gradient. In chunks only a few rows of them exist at a time; the gradients of the head's
input and matrix are taken at once and kept until the backward.
"""

from __future__ import annotations

from stages.config.run_config import ModelConfig

LARGE_LOGITS = 2**28
"""Bytes of whole logits, in at least float32, from which on they are computed in chunks. Below it the plain
form is as fast, and keeps the bits that it has always had."""
CHUNK_BYTES = 2**27
"""Most bytes of one chunk's logits, in at least float32, on a CPU."""
GPU_CHUNK_BYTES = 2**30
"""The same on a GPU. Each chunk reads and writes the gradient of the matrix: in chunks of `CHUNK_BYTES`, at
131k tokens in the vocabulary and width 4,096, that takes as long as the products. Not measured."""
LEAST_ROWS = 64
"""Rows of a chunk, whatever they take: with fewer a matrix product is slow."""


def shard_chunk(*, rows: int, wide: int, on_gpu: bool) -> int:
    """Tokens of which a shard of the head computes the logits at once.

    Args:
        rows: of the matrix in the shard.
        wide: as for `chunk_rows`.
        on_gpu: likewise.
    """
    most = (GPU_CHUNK_BYTES if on_gpu else CHUNK_BYTES) // (rows * wide)
    return max(LEAST_ROWS, most // LEAST_ROWS * LEAST_ROWS)


def has_terms(config: ModelConfig) -> bool:
    """Whether logits are capped, or something is added to the cross-entropy."""
    return config.logit_softcap is not None or config.z_loss > 0


def chunk_rows(
    *, tokens: int, width: int, vocabulary: int, wide: int, on_gpu: bool, always: bool = False
) -> int | None:
    """Rows of a chunk; None: the head is computed in one piece.

    Args:
        tokens: of a micro-batch.
        width: of the head's input.
        vocabulary: number of logits of a token.
        wide: bytes of a logit, in at least float32.
        on_gpu: whether it is computed on a GPU.
        always: in chunks, if only one: the loss has terms whose gradients are computed there alone.
    """
    # The gradient of the matrix is kept in place of the logits: a gain only where there are more tokens.
    if tokens * vocabulary * wide < LARGE_LOGITS or tokens < width:
        return tokens if always else None
    rows = (GPU_CHUNK_BYTES if on_gpu else CHUNK_BYTES) // (vocabulary * wide) // LEAST_ROWS * LEAST_ROWS
    return min(tokens, max(LEAST_ROWS, rows))
