"""Memory and step time of one run, from its configuration and what the model's parts cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf, prod
from typing import Protocol

import schedules
from asyncpp_cli.planner.parts import Part, Parts
from asyncpp_cli.planner.represented import Shape, represented
from asyncpp_cli.planner.step_time import StageTimes, StepTime, step_time
from asyncpp_cli.planner.temporary import (
    allocator_bytes,
    backward_bytes,
    communicator_bytes,
    update_bytes,
)
from asyncpp_cli.settings import copy_of
from stages.config import RunConfig, tokens_per_step
from stages.memory import (
    message_bytes,
    parameter_shapes,
    reduction_bytes,
    stage_memory,
)
from stages.ownership import share_out
from stages.partition import StageCut, cut_of, fitting_cut, stage_cuts
from stages.rounds import ROUND_BYTES, UNDER_WAY

GB = 1e9
WORTH_A_CUT = 0.01
"""Share of the step that another cut than the default one must save."""
RECEIVED_AHEAD = 2
"""Buffers for what comes next from each neighbour."""


MOST = {"reduction": 2 * UNDER_WAY * ROUND_BYTES}
"""Bytes of a kind of memory, at most."""
OF_THE_DEVICE = ("communicators", "allocator")
"""Kinds of memory that are no tensors."""


class Costs(Protocol):
    """What the model's parts and what is between them take, in seconds: estimated or measured."""

    @property
    def source(self) -> str:
        """What the times are of, for people."""

    def parts(self, config: RunConfig) -> Parts: ...

    def update(self, config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """The optimizer step of parameters of these shapes."""

    def reduction(self, config: RunConfig, parameters: int) -> float:
        """A stage's gradients to their owners, and weights back."""

    def message(self, config: RunConfig) -> float:
        """From one stage to the next."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run is expected to take."""

    config: RunConfig
    cut: tuple[int, ...]
    """Blocks of each stage."""
    memory: tuple[dict[str, int], ...]
    """Bytes of each stage by kind: those of `StageMemory`, `messages`, `reduction`, `temporary` and those
    `OF_THE_DEVICE`. What a rank has once is counted at the first of its stages."""
    step: StepTime
    delay: int
    """Most updates between the weights of a gradient and those it is applied to."""

    @property
    def own_cut(self) -> bool:
        """Whether the run is cut so by itself; if not, `parallel.cut` must say it."""
        return list(self.cut) == [len(cut.blocks) for cut in cut_of(self.config)]

    @property
    def stage_gb(self) -> list[float]:
        """Of each stage, 10^9 bytes."""
        return [sum(of_stage.values()) / GB for of_stage in self.memory]

    @property
    def rank_gb(self) -> list[float]:
        """Of each rank, 10^9 bytes."""
        ranks = self.config.parallel.stages
        return [sum(self.stage_gb[rank::ranks]) for rank in range(ranks)]

    @property
    def memory_gb(self) -> float:
        """Of the fullest rank, 10^9 bytes."""
        return max(self.rank_gb)

    @property
    def tokens_per_second(self) -> float:
        return tokens_per_step(self.config) / self.step.seconds


def estimate(config: RunConfig, costs: Costs, *, limit_gb: float | None) -> Estimate:
    """What `config` takes.

    Args:
        config: of a run that could be trained.
        costs: of its parts.
        limit_gb: memory of a device, 10^9 bytes: where `parallel.cut` is open, the stages are then cut by
            `costs` so that they fit, if the default cut does not or is slower; None: the run's own cut.

    Raises:
        schedules.ScheduleError: the schedule cannot be had with these numbers.
    """
    own = [len(cut.blocks) for cut in cut_of(config)]
    planned = _with_cut(config, own, costs)
    if limit_gb is None or config.parallel.cut is not None or config.schedule.chunks > 1:
        return planned
    other = _fitting(config, costs, limit_gb=limit_gb)
    if other is None or other == own:
        return planned
    changed = _with_cut(config, other, costs)
    if planned.memory_gb <= limit_gb and changed.step.seconds > (1 - WORTH_A_CUT) * planned.step.seconds:
        return planned
    return changed


def _with_cut(config: RunConfig, sizes: list[int], costs: Costs) -> Estimate:
    shape = Shape.of(config)
    return Estimate(
        config=config,
        cut=tuple(sizes),
        memory=tuple(_memory(config, sizes)),
        step=step_time(
            config.schedule.name,
            _stage_times(config, stage_cuts(sizes), costs),
            microbatches=config.schedule.microbatches,
            update_interval=config.schedule.update_interval,
            chunks=config.schedule.chunks,
            ahead=shape.ahead,
        ),
        delay=represented(shape).delay,
    )


def _fitting(config: RunConfig, costs: Costs, *, limit_gb: float) -> list[int] | None:
    """The cut with the fastest slowest stage among those that fit."""
    stages = config.parallel.stages
    parts, recompute = costs.parts(config), config.train.recompute
    block = _whole(parts.block) + recompute * parts.block.forward
    # Every kind of memory grows by the same for each further block of a stage, up to the most that it can be.
    one, two = (_memory(config, [size] * stages) for size in (1, 2))

    def cost(stage: int, size: int) -> float:
        ends = (stage == 0) * _whole(parts.embedding) + (stage == stages - 1) * _whole(parts.head)
        return size * block + ends

    def fits(stage: int, size: int) -> bool:
        return (
            sum(
                min(held + (size - 1) * (two[stage][kind] - held), MOST.get(kind, inf))
                for kind, held in one[stage].items()
            )
            <= limit_gb * GB
        )

    return fitting_cut(blocks=config.model.layers, stages=stages, cost=cost, fits=fits)


def _memory(config: RunConfig, sizes: list[int]) -> list[dict[str, int]]:
    config = copy_of(config)
    config.parallel.cut = sizes
    run = represented(Shape.of(config))
    synchronous = schedules.is_synchronous(config.schedule.name)
    held = stage_memory(config, run.course, gradient_buffers=run.buffers)
    cuts, ranks = stage_cuts(sizes), config.parallel.stages
    memory = []
    for stage, (cut, of_stage) in enumerate(zip(cuts, held, strict=True)):
        values = [prod(shape) for shape in parameter_shapes(config.model, cut).values()]
        bounds = share_out(values, data_ranks=config.parallel.data).bounds
        updating = update_bytes(config, max(end - start for start, end in pairwise(bounds)))
        backward = backward_bytes(config, cut)
        if run.buffers[stage] > 1:
            # It runs beside backwards, in a queue that has memory of its own.
            temporary = backward + updating
        else:
            # A synchronous pipeline is empty when it updates.
            temporary = max(backward, updating - (of_stage.activations if synchronous else 0))
        neighbours = (not cut.has_embedding) + (not cut.has_head)
        messages = neighbours * RECEIVED_AHEAD * message_bytes(config)
        coming_and_going = of_stage.activations + of_stage.recomputed + temporary
        first = stage < ranks
        memory.append(
            asdict(of_stage)
            | {
                "messages": messages,
                "reduction": reduction_bytes(config, cuts[stage::ranks]) if first else 0,
                "temporary": temporary,
                "communicators": _communicators(config, stage) if first else 0,
                "allocator": allocator_bytes(coming_and_going),
            }
        )
    return memory


def _communicators(config: RunConfig, rank: int) -> int:
    ranks = config.parallel.stages
    neighbours = (rank > 0) + (rank < ranks - 1)
    if config.schedule.chunks > 1 and ranks > 1:
        # The last rank sends to the first, which is a neighbour already where there are two.
        neighbours = min(2, ranks - 1)
    return communicator_bytes(neighbours=neighbours, stages=ranks, data=config.parallel.data)


def _stage_times(config: RunConfig, cuts: list[StageCut], costs: Costs) -> StageTimes:
    parts, again = costs.parts(config), config.train.recompute
    forward, backward, first, second, update, reduction = [], [], [], [], [], []
    for cut in cuts:
        held = [(len(cut.blocks), parts.block)]
        held += [(1, parts.embedding)] * cut.has_embedding + [(1, parts.head)] * cut.has_head
        forward.append(sum(count * part.forward for count, part in held))
        recomputed = again * len(cut.blocks) * parts.block.forward
        backward.append(sum(count * part.backward for count, part in held) + recomputed)
        first.append(sum(count * part.input_half for count, part in held) + recomputed)
        second.append(sum(count * part.weight_half for count, part in held))
        shapes = parameter_shapes(config.model, cut)
        values = {name: prod(shape) for name, shape in shapes.items()}
        owned = share_out(list(values.values()), data_ranks=config.parallel.data).owned
        names = list(shapes)
        update.append(costs.update(config, {names[index]: shapes[names[index]] for index in owned[0]}))
        reduction.append(costs.reduction(config, sum(values.values())))
    return StageTimes(
        forward=tuple(forward),
        backward=tuple(backward),
        input_half=tuple(first),
        weight_half=tuple(second),
        update=tuple(update),
        reduction=tuple(reduction),
        message=costs.message(config),
    )


def _whole(part: Part) -> float:
    return part.forward + part.backward
