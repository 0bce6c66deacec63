"""How the head is divided: its matrix in shards, one per rank, and its logits in chunks of rows. Imports no
torch.

A shard is a parameter of its own, called after its rows: `head.weight[0:500]`. Checkpoints hold them under
these names, and can be read with other shards, or with none.

Whole logits are the largest tensor of a run: 4 GB in float32 at 8,192 tokens and a vocabulary of 128k, and as
much again for their gradient. In chunks only a few rows of them exist at a time; the gradients of the head's
input and matrix are taken at once and kept until the backward.
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from stages.config.run_config import ModelConfig

ALIGNED = 64
"""Rows of a shard are a multiple of it where a shard has many times as many: GPUs then multiply faster."""
_MANY = 16
_ROWS = re.compile(r"\[(\d{1,9}):(\d{1,9})\]")


@lru_cache(maxsize=1024)
def shard_rows(vocabulary: int, *, row: int, others: tuple[int, ...]) -> tuple[range, ...]:
    """The rows of each rank's shard, in order, such that ranks compute about equally much; none is empty
    where there are as many rows.

    Args:
        vocabulary: rows of the whole matrix.
        row: cost of a row.
        others: of each rank, the cost of what it has besides its shard.
    """
    unit = ALIGNED if vocabulary >= _MANY * ALIGNED * len(others) else 1
    held = [1] * len(others)
    least = [(cost + unit * row, rank) for rank, cost in enumerate(others)]
    heapify(least)
    for _ in range(-(-vocabulary // unit) - len(others)):
        cost, rank = least[0]
        held[rank] += 1
        heapreplace(least, (cost + unit * row, rank))
    ends = accumulate((unit * units for units in held), initial=0)
    return tuple(range(first, min(end, vocabulary)) for first, end in pairwise(ends))


def rows_name(name: str, rows: range) -> str:
    """The name of some rows of a parameter."""
    return f"{name}[{rows.start}:{rows.stop}]"


def whole_name(name: str) -> str:
    """The parameter that a name is, or has rows of."""
    return split_name(name)[0]


def split_name(name: str) -> tuple[str, range | None]:
    """The name of the whole parameter, or the key of a tensor of it, and the rows; None: it is whole."""
    found = _ROWS.search(name)
    if found is None:
        return name, None
    return name[: found.start()] + name[found.end() :], range(int(found[1]), int(found[2]))


LARGE_LOGITS = 2**28
"""Bytes of whole logits, in at least float32, from which on they are computed in chunks. Below it the plain
form is as fast, and keeps the bits that it has always had."""
CHUNK_BYTES = 2**27
"""Most bytes of one chunk's logits, in at least float32, on a CPU."""
GPU_CHUNK_BYTES = 2**30
"""Most bytes of one chunk's logits, in at least float32, on a GPU. Each chunk reads and writes the gradient
of the matrix: in chunks of `CHUNK_BYTES`, at 131k tokens in the vocabulary and width 4,096, that takes as
long as the products. Not measured."""
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
