"""Times of the stages of a cut, from the costs of the model's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncpp_cli.planner.alike import Settings, alike_cuts, remembered
from asyncpp_cli.planner.costs.roofline import ModelTimes, PartTimes
from asyncpp_cli.planner.step_time import StageTimes
from stages.config.run_config import RunConfig
from stages.config.segments import (
    has_tied_shards,
    schedule_facts,
)
from stages.shape.partition import (
    StageCut,
    cut_of,
    owned_members,
    stage_cuts,
    stage_parameters,
    with_head_shards,
)
from stages.shape.spec import Parameter


class CostModel(Protocol):
    """Seconds of the model's parts and of communication, estimated or measured."""

    @property
    def source(self) -> str:
        """Where the times come from, for display."""

    @property
    def threads(self) -> int | None:
        """Cores of a rank; None: the times are those of a GPU."""

    def parts(self, config: RunConfig) -> ModelTimes:
        """A micro-batch in each part of the model."""

    def update(self, config: RunConfig, parameters: Sequence[Parameter]) -> float:
        """An optimizer step on these parameters."""

    def reduction(self, config: RunConfig, parameters: int) -> float:
        """Reduce-scatter of a stage's gradients and all-gather of its weights, over the data ranks."""

    def beside_reduction(self, config: RunConfig, parameters: int) -> float:
        """That what is computed beside a reduction takes longer."""

    def message(self, config: RunConfig) -> float:
        """A message from one stage to the next."""


def layout_cuts(config: RunConfig, sizes: Sequence[float]) -> list[StageCut]:
    """The stages of a cut as in `parallel.cut`, with shards of the head behind them where there are any."""
    cuts = stage_cuts(sizes)
    if not config.parallel.shard_head:
        return cuts
    return with_head_shards(config, cuts)


def own_cut_of(config: RunConfig) -> list[float]:
    return [cut.size for cut in cut_of(config) if cut.head_rows is None]


@dataclass(frozen=True)
class Asked:
    """Settings and costs, as key of a cache."""

    settings: Settings
    of_costs: int
    """Which costs: they stay as long as the key does."""
    costs: CostModel = field(compare=False)

    @classmethod
    def of(cls, config: RunConfig, costs: CostModel) -> Asked:
        return cls(Settings(config), id(costs), costs)


@remembered
def parts_of(asked: Asked) -> ModelTimes:
    """The times of the model's parts, computed once for all layouts that have them."""
    return asked.costs.parts(asked.settings.config)


def stage_times(config: RunConfig, cuts: list[StageCut], costs: CostModel) -> StageTimes:
    """Times of the stages of a cut."""
    asked = Asked.of(config, costs)
    parts, facts = parts_of(asked), schedule_facts(config)
    forward: list[float] = []
    backward: list[float] = []
    input_half: list[float] = []
    weight_half: list[float] = []
    update: list[float] = []
    reduction: list[float] = []
    head: list[float] = []
    head_weight: list[float] = []
    # A look-up writes as much whatever rows a shard has.
    tied_shards = [cut.head_rows is not None for cut in cuts] if has_tied_shards(config) else []
    hides = facts.updates_together and not facts.synchronous and not config.parallel.shard_gradients
    times: dict[int, tuple[float, ...]] = {}
    for cut in alike_cuts(config, cuts):
        if id(cut) not in times:
            times[id(cut)] = _times_of(_Stage(asked, cut, hides))
        for of_stages, seconds in zip(
            (forward, backward, input_half, weight_half, update, reduction, head, head_weight),
            times[id(cut)],
            strict=True,
        ):
            of_stages.append(seconds)
    return StageTimes(
        forward=tuple(forward),
        backward=tuple(backward),
        input_half=tuple(input_half),
        weight_half=tuple(weight_half),
        update=tuple(update),
        reduction=tuple(reduction),
        head=tuple(head) if config.parallel.shard_head else (),
        head_weight=tuple(head_weight) if config.parallel.shard_head else (),
        embed=tuple(parts.embedding.forward * is_shard for is_shard in tied_shards),
        embed_weight=tuple(parts.embedding.backward * is_shard for is_shard in tied_shards),
        message=costs.message(config),
    )


@dataclass(frozen=True)
class _Stage:
    """A stage, as key of a cache."""

    asked: Asked
    cut: StageCut
    hides_reductions: bool


@remembered
def _times_of(stage: _Stage) -> tuple[float, ...]:
    """Forward, backward, its halves, update and reduction of a stage, and of a shard of the head its two
    actions, seconds."""
    config, cut, costs = stage.asked.settings.config, stage.cut, stage.asked.costs
    parts = parts_of(stage.asked)
    blocks = [parts.piece(halves) for halves in cut.pieces]
    contents = (
        blocks
        + [parts.embedding] * (cut.has_embedding and cut.head_rows is None)
        + [parts.head] * cut.has_head
    )
    recomputed = sum(recomputing(config, block) for block in blocks)
    parameters = stage_parameters(config.model, cut)
    owned = owned_members(parameters, data_ranks=config.parallel.data)
    count = sum(parameter.size for parameter in parameters)
    update = costs.update(config, owned[0])
    if stage.hides_reductions:
        # What hides a reduction takes longer for it; that is counted here, once in a step.
        update += costs.beside_reduction(config, count)
    return (
        sum(part.forward for part in contents),
        sum(part.backward for part in contents) + recomputed,
        sum(part.input_half for part in contents) + recomputed,
        sum(part.weight_half for part in contents),
        update,
        costs.reduction(config, count),
        *_shard_times(config, cut, parts.head),
    )


def _shard_times(config: RunConfig, cut: StageCut, head: PartTimes) -> tuple[float, float]:
    """Of a shard of the head: the logits with the gradient of its input, and the gradient of its weights;
    (0, 0) for other stages."""
    if cut.head_rows is None:
        return 0.0, 0.0
    return shard_share(head, len(cut.head_rows) / config.model.vocab_size)


def shard_share(head: PartTimes, share: float) -> tuple[float, float]:
    """The two actions of a shard with this share of the head's rows, seconds.

    Where the whole head is computed in chunks, its forward has all three products.
    """
    weights = head.weight_half or whole_time(head) / 3
    return (whole_time(head) - weights) * share, weights * share


def recomputing(config: RunConfig, block: PartTimes) -> float:
    """Seconds that recomputation adds to a block's backward."""
    return {"none": 0.0, "selective": block.cheap, "full": block.forward}[config.train.recompute]


def whole_time(part: PartTimes) -> float:
    return part.forward + part.backward


def least_work(part: PartTimes) -> float:
    return part.forward + min(part.backward, part.input_half + part.weight_half)
