"""What the layouts of one run share while they are planned: times of parts and stages, memory of stages,
programs. Each is found once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import schedules
from asyncpp_cli.planner.costs.roofline import ModelTimes, PartTimes
from asyncpp_cli.planner.pace import Pace
from asyncpp_cli.planner.programs import Geometry, LayoutProgram
from asyncpp_cli.planner.stage_times import StageTimes
from schedules import ScheduleError, is_custom
from stages.config.run_config import RunConfig, changed
from stages.config.segments import has_tied_shards, schedule_facts
from stages.shape.partition import (
    StageCut,
    cut_of,
    owned_members,
    stage_cuts,
    stage_parameters,
    with_head_shards,
)
from stages.shape.spec import Parameter

Kept = TypeVar("Kept")


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

    def message(self, config: RunConfig, sender: int, receiver: int) -> float:
        """A message from one rank of a pipeline to another."""

    def neighbours(self, config: RunConfig) -> str:
        """Ranks that best share nodes, as in `stages.config.places`."""


def layout_cuts(config: RunConfig, sizes: Sequence[float]) -> list[StageCut]:
    """The stages of a cut as in `parallel.cut`, with shards of the head behind them where there are any."""
    cuts = stage_cuts(sizes)
    return with_head_shards(config, cuts) if config.parallel.shard_head else cuts


def own_cut_of(config: RunConfig) -> list[float]:
    """The blocks of each stage of a run by its own cut, or the default one."""
    return [cut.size for cut in cut_of(config) if cut.head_rows is None]


def recomputing(config: RunConfig, block: PartTimes) -> float:
    """Seconds that recomputation adds to a block's backward."""
    return {"none": 0.0, "selective": block.cheap, "full": block.forward}[config.train.recompute]


def whole_time(part: PartTimes) -> float:
    """Seconds of a part's forward and backward."""
    return part.forward + part.backward


class Nature(NamedTuple):
    """What a schedule does whatever its numbers."""

    splits: bool
    """Whether it splits backwards, without being asked to."""
    is_v: bool
    """Whether its first and last stages are on one rank."""


class Found:
    """What layouts of one run have in common: each is found once."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: it finds the rest itself."""
        return vars(self) | {"_found": {}}

    def once(self, key: tuple[Any, ...], find: Callable[[], Kept]) -> Kept:
        """What `find` returns, for the first of those that ask with this key."""
        if key not in self._found:
            self._found[key] = find()
        kept: Kept = self._found[key]
        return kept

    def program(self, config: RunConfig) -> LayoutProgram:
        """The program of a layout.

        Raises:
            schedules.ScheduleError: the schedule cannot be built for these numbers.
        """

        def built() -> LayoutProgram | ScheduleError:
            try:
                return LayoutProgram(geometry)
            except ScheduleError as error:
                return error

        geometry = Geometry.of(config)
        found = self.once(("program", geometry), built)
        if isinstance(found, ScheduleError):
            raise found
        return found

    def pace(self, config: RunConfig) -> Pace:
        """The pace of a layout that is never flushed."""
        shape = Geometry.of(config).shape
        return self.once(("pace", Pace.shape_of(shape)), lambda: Pace(shape))

    def placement(self, config: RunConfig) -> tuple[int, ...]:
        """The rank of each stage of a layout, shards of the head among them."""
        facts, ranks = schedule_facts(config), config.parallel.stages
        if is_custom(config.schedule.name):
            return self.program(config).rank_of_stage
        blocks = tuple(stage % ranks for stage in range(facts.stages))
        if facts.stages > ranks and self.nature(config).is_v:
            blocks = (*range(ranks), *reversed(range(ranks)))
        return (*blocks, *range(ranks * config.parallel.shard_head))

    def nature(self, config: RunConfig) -> Nature:
        """What the schedule of a layout does on two ranks."""
        name, chunks = config.schedule.name, schedule_facts(config).stages // config.parallel.stages

        def found() -> Nature:
            program = schedules.build(name, stages=2, microbatches=4, steps=1, chunks=chunks)
            return Nature(program.split_backward, program.rank_of_stage[-1] == 0)

        return self.once(("nature", name, chunks), found)


class Shared(Found):
    """What is found once for a search on one machine: what `Found` has, and times."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self.costs = costs

    def placed(self, config: RunConfig) -> RunConfig:
        """A layout with its ranks on nodes as it sends least."""
        ranks = config.parallel.stages, config.parallel.data
        sent = config.train.microbatch_size, config.schedule.microbatches
        best = self.once(("neighbours", *ranks, *sent), lambda: self.costs.neighbours(config))
        return config if best == config.site.neighbours else changed(config, {"site.neighbours": best})

    def parts(self, config: RunConfig) -> ModelTimes:
        """The times of the model's parts."""
        ranks = config.parallel.stages * config.parallel.data
        return self.once(("parts", config.train.microbatch_size, ranks), lambda: self.costs.parts(config))

    def times(self, config: RunConfig, sizes: Sequence[float]) -> StageTimes:
        """Times of the stages of a layout with so many blocks in each."""
        facts, ranks = schedule_facts(config), self.placement(config)
        hides = facts.updates_together and not facts.synchronous and not config.parallel.shard_gradients
        key = ("times of stages", tuple(sizes), ranks, has_tied_shards(config), hides, *settings_of(config))
        return self.once(key, lambda: self._stage_times(config, sizes, ranks, hides=hides))

    def _stage_times(
        self, config: RunConfig, sizes: Sequence[float], ranks: Sequence[int], *, hides: bool
    ) -> StageTimes:
        cuts = layout_cuts(config, sizes)
        found = []
        for cut in cuts:
            key = ("times", kind_of(config, cut), hides, *settings_of(config))
            found.append(self.once(key, partial(self._times_of, config, cut, hides=hides)))
        forward, backward, input_half, weight_half, update, reduction, head, head_weight = zip(
            *found, strict=True
        )
        shards = config.parallel.shard_head
        # A look-up writes as much whatever rows a shard has.
        tied_shards = [cut.head_rows is not None for cut in cuts] if has_tied_shards(config) else []
        embedding, following = self.parts(config).embedding, (*ranks[1:], ranks[-1])
        return StageTimes(
            forward=forward,
            backward=backward,
            input_half=input_half,
            weight_half=weight_half,
            update=update,
            reduction=reduction,
            head=head if shards else (),
            head_weight=head_weight if shards else (),
            embed=tuple(embedding.forward * is_shard for is_shard in tied_shards),
            embed_weight=tuple(embedding.backward * is_shard for is_shard in tied_shards),
            message=tuple(
                0.0 if rank == after else self.costs.message(config, rank, after)
                for rank, after in zip(ranks, following, strict=True)
            ),
        )

    def _times_of(self, config: RunConfig, cut: StageCut, *, hides: bool) -> tuple[float, ...]:
        """Forward, backward, its halves, update and reduction of a stage, and of a shard of the head its two
        actions, seconds."""
        parts, costs = self.parts(config), self.costs
        blocks = [parts.piece(halves) for halves in cut.pieces]
        is_shard = cut.head_rows is not None
        contents = blocks + [parts.embedding] * (cut.has_embedding and not is_shard)
        contents += [parts.head] * cut.has_head
        recomputed = sum(recomputing(config, block) for block in blocks)
        parameters = stage_parameters(config.model, cut)
        count = sum(parameter.size for parameter in parameters)
        update = costs.update(config, owned_members(parameters, data_ranks=config.parallel.data)[0])
        if hides:
            # What hides a reduction takes longer for it; that is counted here, once in a step.
            update += costs.beside_reduction(config, count)
        return (
            sum(part.forward for part in contents),
            sum(part.backward for part in contents) + recomputed,
            sum(part.input_half for part in contents) + recomputed,
            sum(part.weight_half for part in contents),
            update,
            costs.reduction(config, count),
            *_shard_times(parts.head, len(cut.head_rows or ()) / config.model.vocab_size),
        )


def _shard_times(head: PartTimes, share: float) -> tuple[float, float]:
    """Seconds of the logits with the gradient of their input, and of the gradient of the weights, of a shard
    with this share of the head's rows. Of a head that is computed in chunks the forward has all three."""
    weights = head.weight_half or whole_time(head) / 3
    return (whole_time(head) - weights) * share, weights * share


def kind_of(config: RunConfig, cut: StageCut) -> tuple[Any, ...]:
    """What a stage's times and memory depend on: its halves of blocks by kind, and the ends of the model."""
    start, stop = cut.halves.start, cut.halves.stop
    dense = 2 * config.model.dense_layers if config.model.experts else 0
    rows = None if cut.head_rows is None else len(cut.head_rows)
    ends = cut.has_embedding, cut.has_head, cut.has_norm, rows
    return (start % 2, stop - start, max(0, min(stop, dense) - start), *ends)


def settings_of(config: RunConfig) -> tuple[Any, ...]:
    """The settings in which layouts of one run differ, but for schedule, stages and cut."""
    train, ranks = config.train, (config.parallel.data, config.parallel.stages, config.site.neighbours)
    return (train.microbatch_size, train.recompute, *ranks, *delayed_settings(config))


def delayed_settings(config: RunConfig) -> tuple[Any, ...]:
    """The settings that layouts of one run have where their gradients are late."""
    return config.error_feedback.coefficient, config.correction.name
