"""Cut the model into stages of equal cost. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """What one stage holds: a run of blocks, and at the ends of the model the embedding or the head."""

    blocks: range
    has_embedding: bool
    has_head: bool


def block_cost(config: ModelConfig, *, context: int) -> float:
    """Multiply-adds of one block's forward, a token (attention over half the context on average)."""
    kv_width = config.kv_heads * (config.width // config.heads)
    projections = 2 * config.width * config.width + 2 * config.width * kv_width
    return projections + 3 * config.width * config.mlp_width + config.width * context


def head_cost(config: ModelConfig) -> float:
    """Multiply-adds of the head's forward, a token."""
    return config.width * config.vocab_size


def cut_model(config: ModelConfig, *, stages: int, context: int) -> list[StageCut]:
    """Contiguous stages whose slowest is as fast as can be; every stage holds at least one block.

    The embedding is a look-up and counts as free; the head counts in the last stage.

    Raises:
        ValueError: more stages than blocks.
    """
    if stages > config.layers:
        raise ValueError(f"{stages} stages need at least as many blocks, the model has {config.layers}")
    costs = [block_cost(config, context=context)] * config.layers
    sizes = balance(costs, stages=stages, last_extra=head_cost(config))
    cuts = []
    first = 0
    for stage, size in enumerate(sizes):
        cuts.append(
            StageCut(
                blocks=range(first, first + size), has_embedding=stage == 0, has_head=stage == stages - 1
            )
        )
        first += size
    return cuts


def balance(costs: Sequence[float], *, stages: int, last_extra: float = 0.0) -> list[int]:
    """Sizes of contiguous groups of `costs`, none empty, that minimise the dearest group.

    Dynamic programming over suffixes. Among equally good cuts the earlier stages are given more, since the
    last also computes the loss.

    Args:
        costs: of the items, in order.
        stages: number of groups.
        last_extra: added to the last group.
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[g][i]: the dearest group when items i.. are cut into g groups, and the size of the first of them
    best: list[list[tuple[float, int]]] = [
        [],
        [(total[count] - total[i] + last_extra, count - i) for i in range(count)],
    ]
    for groups in range(2, stages + 1):
        row = []
        for i in range(count - groups + 1):
            options = (
                (max(total[i + size] - total[i], best[groups - 1][i + size][0]), -size)
                for size in range(1, count - i - groups + 2)
            )
            dearest, negative_size = min(options)
            row.append((dearest, -negative_size))
        best.append(row)
    sizes = []
    first = 0
    for groups in range(stages, 0, -1):
        sizes.append(best[groups][first][1])
        first += sizes[-1]
    return sizes
