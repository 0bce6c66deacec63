"""What the ranks agree on before a step: what to clip by, whether to step at all, and whether to end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stages.copies import to_host
from stages.groups import Exchange, Group, Reduction, sum_in_order
from stages.update import StageState, squared_norm
from stages.weights import GradientBuffer


@dataclass(frozen=True, kw_only=True)
class UpdateRules:
    """How the updates of a run are made."""

    clip: str
    """`global`, `stage` or `none`."""
    common_step: bool
    """Whether all stages update together, so that they skip together; if not, each stage is on its own."""
    max_skipped: int
    """Updates skipped in a row after which the run gives up; 0: it never does."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A stage's gradient that an update is to apply."""

    stage: int
    version: int
    gradient: GradientBuffer
    losses: list[Tensor]
    reduction: Reduction
    began_at: list[float] = field(default_factory=list)
    """Clock when the last backward had been done, seconds; empty until it is known."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the ranks agreed on before a step."""

    squares: Mapping[int, float]
    """Squared norm of the gradient of each stage of this rank."""
    total: float | None
    """Over all stages; None where each is on its own."""
    train_loss: float
    stop: bool
    """Whether a rank has been told to end, of those that agreed."""

    def judged(self, stage: int) -> float:
        """The squared norm that must be finite for `stage` to step."""
        return self.squares[stage] if self.total is None else self.total

    def clip_by(self, stage: int, rules: UpdateRules) -> float | None:
        """The squared norm that the gradient of `stage` is clipped by; None: it is not."""
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
) -> Generator[Exchange[Any], None, Verdict]:
    """Add up the gradients, agree with the other ranks, and clip; yields what it waits for.

    The verdict is made where the gradients are, and the host must know it before it launches the step: what
    torch's optimizers do at a step is not all on the device. Everything before follows from the numbers
    there, clipping too, so on a GPU the host has one look to take: whether the numbers have come.

    Args:
        unit: of the stages that update as one.
        stages: of the rank, by number.
        rank_of_stage: of the program.
        pipeline: the ranks of this rank's pipeline, in order.
        data: the data ranks that hold the same stages.
        rules: how updates are made.
        stop: whether this process has been told to end.
        reduced: called once the gradients have been added.
    """
    for gathered in unit:
        yield gathered.reduction
        gathered.reduction.take()
    reduced()
    squares = []
    for gathered in unit:
        stages[gathered.stage].update.prepare(gathered.gradient)
        squares.append(squared_norm(gathered.gradient))
    told = torch.full_like(squares[0], float(stop()))
    losses = [loss for gathered in unit for loss in gathered.losses]
    train_loss = torch.stack(losses).double().mean() if losses else torch.zeros_like(told)
    if data.size > 1:
        shared = data.share(torch.stack([*squares, told, train_loss]))
        yield shared
        *squares, told, train_loss = sum_in_order(shared.take()).unbind()
        train_loss = train_loss / data.size
    numbers = [train_loss, *squares]
    clip_by = dict(zip((gathered.stage for gathered in unit), squares, strict=True))
    if rules.common_step:
        common = pipeline.share(torch.stack([*squares, told]))
        yield common
        of_ranks = common.take()
        told = sum_in_order([of_rank[-1] for of_rank in of_ranks])
        total = sum_in_order(_by_stage(of_ranks, rank_of_stage))
        numbers.append(total)
        if rules.clip == "global":
            clip_by = dict.fromkeys(clip_by, total)
    coming = to_host(torch.stack([*numbers, told]))
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


def _by_stage(of_ranks: Sequence[Tensor], rank_of_stage: Sequence[int]) -> list[Tensor]:
    """The first numbers of each rank, one for each of its stages, in the order of the stages."""
    numbers = [iter(of_rank) for of_rank in of_ranks]
    return [next(numbers[rank]) for rank in rank_of_stage]
