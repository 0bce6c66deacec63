"""Cut the model into stages of equal cost. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stages.config import ModelConfig, RunConfig


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


def cut_of(config: RunConfig) -> list[StageCut]:
    """The stages of a run: as `parallel.cut` says, or else of equal cost.

    Raises:
        ValueError: more stages than blocks.
    """
    if config.parallel.cut is not None:
        return stage_cuts(config.parallel.cut)
    stages = config.parallel.stages * config.schedule.chunks
    return cut_model(config.model, stages=stages, context=config.data.context)


def cut_model(config: ModelConfig, *, stages: int, context: int) -> list[StageCut]:
    """Contiguous stages whose slowest is as fast as can be; every stage holds at least one block.

    The embedding is a look-up and counts as free; the head counts in the last stage.

    Raises:
        ValueError: more stages than blocks.
    """
    if stages > config.layers:
        raise ValueError(f"{stages} stages need at least as many blocks, the model has {config.layers}")
    block = block_cost(config, context=context)
    return stage_cuts(_equal_blocks(config.layers, block, stages=stages, last_extra=head_cost(config)))


@lru_cache(maxsize=1024)  # a planner asks for the same cut again and again
def _equal_blocks(count: int, cost: float, *, stages: int, last_extra: float) -> tuple[int, ...]:
    return tuple(balance([cost] * count, stages=stages, last_extra=last_extra))


def stage_cuts(sizes: Sequence[int]) -> list[StageCut]:
    """The stages that hold so many blocks each."""
    cuts = []
    first = 0
    for stage, size in enumerate(sizes):
        cuts.append(
            StageCut(
                blocks=range(first, first + size), has_embedding=stage == 0, has_head=stage == len(sizes) - 1
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


def fitting_cut(
    *,
    blocks: int,
    stages: int,
    cost: Callable[[int, int], float],
    fits: Callable[[int, int], bool],
) -> list[int] | None:
    """Blocks of each stage so that every stage fits its memory, and the slowest is as fast as can be.

    Dynamic programming over stages from the last. Among equally good cuts the earlier stages are given more,
    as `balance` does.

    Args:
        blocks: of the model, all alike.
        stages: number of stages, each with at least one block.
        cost: of a stage with so many blocks: `cost(stage, blocks)`, embedding and head included.
        fits: whether it fits, likewise; where it does, so does it with fewer blocks.

    Returns:
        None where there is no such cut.
    """
    never = float("inf")
    # slowest[n]: of the stages behind, with n blocks among them; chosen[stage][n]: what `stage` takes of n
    slowest = [0.0] + [never] * blocks
    chosen: list[list[int]] = []
    for stage in reversed(range(stages)):
        most = max((size for size in range(1, blocks + 1) if fits(stage, size)), default=0)
        costs = [0.0, *(cost(stage, size) for size in range(1, most + 1))]
        row, sizes = [never] * (blocks + 1), [0] * (blocks + 1)
        for count in range(1, blocks + 1):
            for size in range(min(most, count), 0, -1):
                dearest = max(costs[size], slowest[count - size])
                if dearest < row[count]:
                    row[count], sizes[count] = dearest, size
        slowest = row
        chosen.append(sizes)
    if slowest[blocks] == never:
        return None
    cut = []
    left = blocks
    for sizes in reversed(chosen):
        cut.append(sizes[left])
        left -= sizes[left]
    return cut
