"""Cuts of a model into stages of equal cost. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stages.config import ModelConfig, RunConfig
from stages.model.families import describe
from stages.model.spec import Parameter
from stages.pipeline.segments import schedule_facts


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The parts of one stage: consecutive blocks, and at the ends of the model the embedding or the head."""

    blocks: range
    has_embedding: bool
    has_head: bool


def stage_parameters(config: ModelConfig, cut: StageCut) -> tuple[Parameter, ...]:
    """Parameters of a stage, in the module's order."""
    return _stage_parameters(tuple(vars(config).values()), cut)


@lru_cache(maxsize=256)  # a planner asks for the same stage again and again
def _stage_parameters(settings: tuple[Any, ...], cut: StageCut) -> tuple[Parameter, ...]:
    spec = describe(ModelConfig(*settings))
    return tuple(spec.parameters(cut.blocks, embedding=cut.has_embedding, head=cut.has_head))


def cut_of(config: RunConfig) -> list[StageCut]:
    """The stages of a run: as `parallel.cut` says, or else of equal cost.

    Raises:
        ValueError: more stages than blocks.
    """
    if config.parallel.cut is not None:
        return stage_cuts(config.parallel.cut)
    return cut_model(config.model, stages=schedule_facts(config).stages, context=config.data.context)


def cut_model(config: ModelConfig, *, stages: int, context: int) -> list[StageCut]:
    """Contiguous stages whose slowest is as fast as possible; every stage holds at least one block.

    The embedding is a look-up and counts as free; the head counts in the last stage.

    Raises:
        ValueError: more stages than blocks.
    """
    if stages > config.layers:
        raise ValueError(f"{stages} stages need at least as many blocks, the model has {config.layers}")
    spec = describe(config)
    block, head = (part.forward_multiply_adds(context=context) for part in (spec.block, spec.head))
    return stage_cuts(_equal_blocks(config.layers, block, stages=stages, last_extra=head))


@lru_cache(maxsize=1024)  # a planner asks for the same cut again and again
def _equal_blocks(count: int, cost: float, *, stages: int, last_extra: float) -> tuple[int, ...]:
    return tuple(balance([cost] * count, stages=stages, last_extra=last_extra))


def stage_cuts(sizes: Sequence[int]) -> list[StageCut]:
    """Stages with these numbers of blocks."""
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
    """Sizes of contiguous groups of `costs`, none empty, that minimise the most expensive group.

    Dynamic programming over suffixes. Among equally good cuts earlier stages get more, since the last also
    computes the loss.

    Args:
        costs: of the items, in order.
        stages: number of groups.
        last_extra: added to the last group.
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[g][i]: cost of the most expensive group if items i.. form g groups, and the size of the first group
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
    """Blocks of each stage such that every stage fits its memory and the slowest is as fast as possible.

    Dynamic programming over stages from the last. Among equally good cuts earlier stages get more, as in
    `balance`.

    Args:
        blocks: number of blocks, all alike.
        stages: number of stages, each with at least one block.
        cost: `cost(stage, blocks)`: of a stage with that many blocks, embedding and head included.
        fits: `fits(stage, blocks)`: whether it fits; then it fits with fewer blocks, too.

    Returns:
        None where there is no such cut.
    """
    never = float("inf")
    # slowest[n]: cost of the slowest later stage if they have n blocks; chosen[stage][n]: blocks of `stage`
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
