"""What one update does, in phases between which it waits for an exchange: reduce the gradient over the data
ranks, agree with the pipeline's ranks, clip, step, and broadcast the new weights from their owners."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedules.actions import NO_MICROBATCH, Action, Op, Program
from schedules.dependencies import steps_to_agree
from stages.comm.collectives import Exchange, Group, Reduction, sum_in_order
from stages.comm.topology import Connection
from stages.update.clock import Clock
from stages.update.optimizer_step import StageState, squared_norm
from stages.update.rank_stats import RankTrace, StepResult
from stages.update.update_stream import to_host
from stages.weights.flat_buffers import GradientBuffer
from stages.weights.weight_versions import Replica


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
class UpdateContext:
    """What the updates of a rank work with."""

    stages: Mapping[int, StageState]
    """Stages of the rank, by number."""
    connection: Connection
    """To the other ranks."""
    rules: UpdateRules
    clock: Clock
    """Clock of the device that computes."""
    on_step: Callable[[StepResult], None]
    """Called with each update of the last stage, on the ranks that hold it."""
    stop: Callable[[], bool]
    """Whether this process has been asked to stop. Where all stages update together, all ranks then end the
    segment early, after the same step."""


class _Verdict(NamedTuple):
    """The decision before a step."""

    squares: Mapping[int, float]
    """By stage of this rank, the squared norm that must be finite for it to step: of its gradient, or over
    all stages where they update together."""
    clip_by: Mapping[int, float | None]
    """By stage, the squared norm that its gradient is clipped by; None: not clipped."""
    train_loss: float
    stop: bool
    """Whether one of the ranks was asked to stop."""


class UpdatePhases:
    """The work of a rank's updates, and the step before which they end.

    Args:
        context: of the rank.
        update_clock: of the updates; the context's is of the actions.
    """

    def __init__(self, context: UpdateContext, *, update_clock: Clock) -> None:
        self._rank = context
        self._stages, self._rules = context.stages, context.rules
        self._update_clock = update_clock
        self._skipped = dict.fromkeys(context.stages, 0)
        self.agreement = Agreement(context.connection.pipeline, end=self._end_before)

    def begin(self, program: Program, trace: RankTrace) -> None:
        """Prepare for a segment; its measurements go to `trace`."""
        self._program = program
        self._trace = trace
        self._ending = False
        self.agreeing = program.first_step
        """The latest version for which this rank has given its part of what all ranks exchange."""
        self.end_step = program.first_step + program.steps
        """The step before which the segment ends; earlier than the program's once a rank is asked to stop."""
        self.agreement.begin(program)

    def run(
        self, unit: Sequence[Gathered], *, reduced: Callable[[], None], may_agree: Exchange[None]
    ) -> Generator[Exchange[Any], None, None]:
        """Update the stages of `unit`; yields each exchange that must have completed before it goes on.

        Args:
            unit: gradients of the stages that update together.
            reduced: called once the gradients are reduced.
            may_agree: complete once the exchange with the pipeline's ranks may begin.
        """
        for gathered in unit:
            yield gathered.reduction
            gathered.reduction.take()
        reduced()
        version, data = unit[0].version, self._rank.connection.data
        # Ranks end after whole steps.
        step, left = divmod(version * self._program.update_interval, self._program.microbatches)
        verdict = yield from self._judge(unit, stop=not left and self._rank.stop(), may_agree=may_agree)
        if not self._rules.common_step and not left:
            self.agreement.tell(step - 1, stop=verdict.stop, device=unit[0].gradient.flat.device)
        elif verdict.stop:
            self._end_before_reader_of(version)
        broadcasts: list[tuple[Gathered, Replica, Exchange[None]]] = []
        for gathered in unit:
            weights = self._stages[gathered.stage].weights
            replica = weights.oldest() if data.size > 1 else None
            self._apply(gathered, verdict)
            if replica is not None:
                exchange = weights.hand_out(data, replica)
                broadcasts.append((gathered, replica, exchange))
        for gathered, replica, exchange in broadcasts:
            yield exchange
            with self._stages[gathered.stage].weights.receiving_others(replica, version=gathered.version):
                exchange.take()

    def _judge(
        self, unit: Sequence[Gathered], *, stop: bool, may_agree: Exchange[None]
    ) -> Generator[Exchange[Any], None, _Verdict]:
        """Agree with the other ranks on the reduced gradients, and clip them.

        The verdict is computed on the device, and the host must know it before it launches the step, because
        a step of torch's optimizers is not all on the device. Everything before it, clipping too, needs no
        value on the host, so on a GPU the host polls once: for the copy of the numbers.
        """
        connection, rules = self._rank.connection, self._rules
        data, pipeline = connection.data, connection.pipeline
        squares = []
        for gathered in unit:
            self._stages[gathered.stage].update.prepare(gathered.gradient)
            squares.append(squared_norm(gathered.gradient))
        stop_requested = torch.full_like(squares[0], float(stop))
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
            self.agreeing = unit[0].version
            yield common
            by_rank = common.take()
            stop_requested = sum_in_order([values[-1] for values in by_rank])
            total = sum_in_order(_by_stage(by_rank, self._program.rank_of_stage))
            numbers.append(total)
            if rules.clip == "global":
                clip_by = dict.fromkeys(clip_by, total)
        coming = to_host(torch.stack([*numbers, stop_requested]))
        if rules.clip != "none":
            for gathered in unit:
                self._stages[gathered.stage].update.clip(gathered.gradient, squared=clip_by[gathered.stage])
        yield coming
        loss, *rest = coming.take()
        own, (*totals, stopped) = rest[: len(unit)], rest[len(unit) :]
        by_stage = dict(zip(clip_by, own, strict=True))
        judged = dict.fromkeys(by_stage, totals[0]) if totals else by_stage
        norms: Mapping[str, Mapping[int, float | None]]
        norms = {"global": judged, "stage": by_stage, "none": dict.fromkeys(by_stage)}
        return _Verdict(judged, norms[rules.clip], loss, stop=stopped > 0)

    def _apply(self, gathered: Gathered, verdict: _Verdict) -> None:
        stage, version = gathered.stage, gathered.version
        step = (version * self._program.update_interval - 1) // self._program.microbatches
        started = self._update_clock.mark()
        result = self._stages[stage].update.apply(
            gathered.gradient,
            version=version,
            step=step,
            clip_by=verdict.clip_by[stage],
            finite=math.isfinite(verdict.squares[stage]),
        )
        self._update_clock.measure(
            started, partial(self._trace.note_action, Action(stage, Op.UPDATE, NO_MICROBATCH, version))
        )
        self._skipped[stage] = self._skipped[stage] + 1 if result.skipped else 0
        if result.skipped and self._trace.not_finite is None:
            name = self._stages[stage].weights.master.not_finite()
            self._trace.not_finite = name and f"the weights of stage {stage} are not finite ({name})"
        if self._skipped[stage] == self._rules.max_skipped > 0 and self._trace.gave_up is None:
            self._give_up(stage, version)
        if stage == self._program.loss_stage:
            # The verdict depends on that backward, so its time is known by now.
            self._rank.clock.settle()
            self._rank.on_step(
                StepResult(
                    version=version,
                    train_loss=verdict.train_loss,
                    update=result,
                    time=gathered.began_at[0],
                )
            )

    def _give_up(self, stage: int, version: int) -> None:
        which = "the gradient" if self._rules.common_step else f"the gradient of stage {stage}"
        self._trace.gave_up = (
            f"{which} was not finite in {self._skipped[stage]} updates in a row, up to update {version}: "
            "none of them was applied (train.max_skipped)"
        )
        if self._rules.common_step:
            self._end_before_reader_of(version)

    def _end_before_reader_of(self, version: int) -> None:
        """End the segment before the first step that reads `version`.

        No rank has begun that step: it first has to complete this update, and then knows of the end.
        """
        if self._ending:
            return
        self._ending = True
        m = self._program.microbatches
        readers = (a for a in self._program.all_actions() if a.op is Op.FORWARD and a.version >= version)
        self._end_before(min((action.microbatch // m for action in readers), default=self.end_step))

    def _end_before(self, step: int) -> None:
        self.end_step = min(self.end_step, step)


def _by_stage(by_rank: Sequence[Tensor], rank_of_stage: Sequence[int]) -> list[Tensor]:
    """The first numbers of each rank, one for each of its stages, in the order of the stages."""
    numbers = [iter(values) for values in by_rank]
    return [next(numbers[rank]) for rank in rank_of_stage]


@dataclass
class _Exchanged:
    step: int
    """The step before which the ranks end, if one of them was asked to stop."""
    phases: Generator[Exchange[Any], None, None]
    awaited: Exchange[Any]


class Agreement:
    """The step at which all ranks stop, once one is asked to, in schedules whose stages update on their own.

    No exchange of an update involves all ranks there. So every rank sends the others a flag at the end of
    each step and goes on; it needs all flags only before it begins a step some steps later
    (`schedules.dependencies.steps_to_agree`). They have arrived by then, so no rank waits.

    Args:
        pipeline: its ranks.
        end: called with the step before which all ranks end.
    """

    def __init__(self, pipeline: Group, *, end: Callable[[int], None]) -> None:
        self._pipeline = pipeline
        self._end = end
        self._exchanged: deque[_Exchanged] = deque()

    def begin(self, program: Program) -> None:
        """Prepare for a segment."""
        self._microbatches = program.microbatches
        self._lag = steps_to_agree(program)
        self._end_step = program.first_step + program.steps

    def tell(self, step: int, *, stop: bool, device: torch.device) -> None:
        """After the last update of `step`, begin to send whether this rank was asked to stop."""
        before = step + 1 + self._lag
        if before >= self._end_step:
            return
        phases = self._phases(before, torch.full((1,), float(stop), dtype=torch.float64, device=device))
        self._exchanged.append(_Exchanged(before, phases, awaited=next(phases)))

    def _phases(self, step: int, stop: Tensor) -> Generator[Exchange[Any], None, None]:
        shared = self._pipeline.all_gather(stop)
        yield shared
        coming = to_host(sum_in_order(shared.take()))
        yield coming
        if coming.take()[0] > 0:
            self._end(step)

    def go_on(self, *, before: Action | None) -> Exchange[Any] | None:
        """Take the flags that have arrived.

        Returns:
            The exchange that must complete before the action `before` (None: before the drain); the caller
            waits for it and then calls `heard`. None if there is none.
        """
        while self._exchanged:
            oldest = self._exchanged[0]
            if not oldest.awaited.ready():
                return oldest.awaited if self._is_needed(before, oldest.step) else None
            self.heard()
        return None

    def _is_needed(self, before: Action | None, step: int) -> bool:
        return before is None or (before.op is Op.FORWARD and before.microbatch >= step * self._microbatches)

    def heard(self) -> None:
        """The exchange that `go_on` returned has completed."""
        oldest = self._exchanged[0]
        try:
            oldest.awaited = next(oldest.phases)
        except StopIteration:
            self._exchanged.popleft()
