"""The decision of the ranks before a step: the norm to clip by, whether to step, and whether to stop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stages.comm.collectives import Exchange, Group, Reduction, sum_in_order
from stages.update.host_copies import to_host
from stages.update.optimizer_step import StageState, squared_norm
from stages.weights.flat_buffers import GradientBuffer


@dataclass(frozen=True, kw_only=True)
class UpdateRules:
    """Rules of a run's updates."""

    clip: str
    """`global`, `stage` or `none`."""
    common_step: bool
    """Whether all stages update, and skip, together; if not, each stage decides by itself."""
    max_skipped: int
    """Consecutive skipped updates after which the run fails; 0: never."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A stage's gradient for an update."""

    stage: int
    version: int
    gradient: GradientBuffer
    losses: list[Tensor]
    reduction: Reduction
    began_at: list[float] = field(default_factory=list)
    """Clock at the end of the last backward, seconds; empty until it is known."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision before a step."""

    squares: Mapping[int, float]
    """Squared norm of the gradient of each stage of this rank."""
    total: float | None
    """Squared norm over all stages; None if each stage decides by itself."""
    train_loss: float
    stop: bool
    """Whether one of the ranks was asked to stop."""

    def judged(self, stage: int) -> float:
        """The squared norm that must be finite for `stage` to step."""
        return self.squares[stage] if self.total is None else self.total

    def clip_by(self, stage: int, rules: UpdateRules) -> float | None:
        """The squared norm that the gradient of `stage` is clipped by; None: not clipped."""
        return {"global": self.total, "stage": self.squares[stage], "none": None}[rules.clip]


def judge(
    unit: Sequence[Gathered],
    *,
    stages: Mapping[int, StageState],
    rank_of_stage: Sequence[int],
    pipeline: Group,
    data: Group,
    rules: UpdateRules,
    stop: Callable[[], bool],
    reduced: Callable[[], None],
    may_agree: Exchange[None],
) -> Generator[Exchange[Any], None, Verdict]:
    """Reduce the gradients, agree with the other ranks, and clip; yields the exchanges that it waits for.

    The verdict is computed on the device, and the host must know it before it launches the step, because a
    step of torch's optimizers is not all on the device. Everything before it, clipping too, needs no value on
    the host, so on a GPU the host polls once: for the copy of the numbers.

    Args:
        unit: gradients of the stages that update together.
        stages: of the rank, by number.
        rank_of_stage: of the program.
        pipeline: the ranks of this rank's pipeline, in order.
        data: the data ranks that hold the same stages.
        rules: of the run's updates.
        stop: whether this process has been asked to stop.
        reduced: called once the gradients are reduced.
        may_agree: complete once the exchange with the pipeline's ranks may begin.
    """
    for gathered in unit:
        yield gathered.reduction
        gathered.reduction.take()
    reduced()
    squares = []
    for gathered in unit:
        stages[gathered.stage].update.prepare(gathered.gradient)
        squares.append(squared_norm(gathered.gradient))
    stop_requested = torch.full_like(squares[0], float(stop()))
    losses = [loss for gathered in unit for loss in gathered.losses]
    train_loss = torch.stack(losses).double().mean() if losses else torch.zeros_like(stop_requested)
    if data.size > 1:
        loads = [gathered.gradient.loads for gathered in unit]
        of_rank = torch.stack([*squares, stop_requested, train_loss])
        # Counts of tokens are exact in float64.
        shared = data.all_gather(torch.cat([of_rank, *(load.flatten().double() for load in loads)]))
        yield shared
        sizes = [len(of_rank), *(load.numel() for load in loads)]
        sums, *counted = torch.split(sum_in_order(shared.take()), sizes)
        for load, count in zip(loads, counted, strict=True):
            load.copy_(count.view_as(load))
        *squares, stop_requested, train_loss = sums.unbind()
        train_loss = train_loss / data.size
    numbers = [train_loss, *squares]
    clip_by = dict(zip((gathered.stage for gathered in unit), squares, strict=True))
    if rules.common_step:
        yield may_agree
        common = pipeline.all_gather(torch.stack([*squares, stop_requested]))
        yield common
        by_rank = common.take()
        stop_requested = sum_in_order([values[-1] for values in by_rank])
        total = sum_in_order(_by_stage(by_rank, rank_of_stage))
        numbers.append(total)
        if rules.clip == "global":
            clip_by = dict.fromkeys(clip_by, total)
    coming = to_host(torch.stack([*numbers, stop_requested]))
    if rules.clip != "none":
        for gathered in unit:
            stages[gathered.stage].update.clip(gathered.gradient, squared=clip_by[gathered.stage])
    yield coming
    loss, *rest = coming.take()
    own, (*totals, stopped) = rest[: len(unit)], rest[len(unit) :]
    return Verdict(
        squares={gathered.stage: square for gathered, square in zip(unit, own, strict=True)},
        total=totals[0] if totals else None,
        train_loss=loss,
        stop=stopped > 0,
    )


def _by_stage(by_rank: Sequence[Tensor], rank_of_stage: Sequence[int]) -> list[Tensor]:
    """The first numbers of each rank, one for each of its stages, in the order of the stages."""
    numbers = [iter(values) for values in by_rank]
    return [next(numbers[rank]) for rank in rank_of_stage]
