"""The updates of a rank from the gathered gradient to the new weights, finished in the pipeline's slack.

An update goes through phases: add the gradient over the data ranks, exchange its norm, step, spread what was
written. Between two phases it waits for an exchange, and the rank goes on with its actions meanwhile. Only an
action that cannot do without the update makes it finish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from schedules.actions import NO_MICROBATCH, Action, Op, Program
from stages.clock import Clock
from stages.copies import to_host
from stages.groups import Exchange, Group, sum_in_order
from stages.trace import RankTrace, StepResult
from stages.update import StageState, squared_norm
from stages.weights import GradientBuffer, Replica


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
class _Gathered:
    """A stage's gradient that an update is to apply."""

    stage: int
    version: int
    gradient: GradientBuffer
    losses: list[Tensor]
    reduction: Exchange[None]
    began_at: list[float] = field(default_factory=list)
    """Clock when the last backward had been done, seconds; empty until it is known."""


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What the ranks agreed on before a step."""

    squares: Mapping[int, float]
    """Squared norm of the gradient of each stage of this rank."""
    total: float | None
    """Over all stages; None where each is on its own."""
    train_loss: float
    stop: bool
    """Whether a rank has been told to end."""


@dataclass
class _Pending:
    version: int
    stages: frozenset[int]
    phases: Generator[Exchange[Any], None, None]
    awaited: Exchange[Any] | None = None


class RankUpdates:
    """The updates of one rank, of which one is under way at a time.

    Where all stages update together, the stages of a rank do so as one.

    Args:
        stages: of the rank, by number.
        pipeline: the ranks of this rank's pipeline, in order.
        data: the data ranks that hold the same stages.
        rules: how updates are made.
        waits: whether this rank waits by itself; if not, it lets other ranks of its process go on.
        clock: of the device that computes.
        on_step: called with each update of the last stage.
        stop: whether this process has been told to end.
    """

    def __init__(
        self,
        *,
        stages: Mapping[int, StageState],
        pipeline: Group,
        data: Group,
        rules: UpdateRules,
        waits: bool,
        clock: Clock,
        on_step: Callable[[StepResult], None],
        stop: Callable[[], bool],
    ) -> None:
        self._stages = stages
        self._pipeline = pipeline
        self._data = data
        self._rules = rules
        self._waits = waits
        self._clock = clock
        self._on_step = on_step
        self._stop = stop
        self._gathered: list[_Gathered] = []
        self._pending: _Pending | None = None
        self._skipped = dict.fromkeys(stages, 0)

    def begin(self, program: Program, trace: RankTrace) -> None:
        """Make ready for a segment, and for what is measured in it."""
        self._program = program
        self._trace = trace
        self._ending = False
        self.end_step = program.first_step + program.steps
        """The step before which the segment ends; earlier than the program's once a rank is told to end."""

    def add(self, action: Action, gradient: GradientBuffer, losses: list[Tensor]) -> None:
        """Begin the update that `action` names, with what its stage has gathered."""
        weights = self._stages[action.stage].weights
        reduction = self._data.reduce(gradient.flat, weights.ownership.bounds, stage=action.stage)
        gathered = _Gathered(
            stage=action.stage, version=action.version, gradient=gradient, losses=losses, reduction=reduction
        )
        self._clock.tell(gathered.began_at.append)
        self._gathered.append(gathered)
        if self._rules.common_step and len(self._gathered) < len(self._stages):
            return
        unit = sorted(self._gathered, key=lambda gathered: gathered.stage)
        self._gathered = []
        self._pending = _Pending(
            version=action.version,
            stages=frozenset(gathered.stage for gathered in unit),
            phases=self._phases(unit),
        )
        self._resume(self._pending)

    def go_on(self, *, before: Action | None) -> Iterator[None]:
        """Go on with the update under way as far as its exchanges have come; finish it where `before` cannot
        do without it, or where nothing is to come (None)."""
        while self._pending is not None:
            awaited = self._pending.awaited
            if awaited is not None and not awaited.ready():
                if before is not None and not self._pending_is_needed(before):
                    return
                if not self._waits:
                    yield
                    continue
                started = self._clock.mark()
                awaited.wait()
                self._clock.measure(started, self._trace.note_wait_for_update)
            self._resume(self._pending)

    def _pending_is_needed(self, action: Action) -> bool:
        assert self._pending is not None
        # One update at a time, so that all data ranks begin their exchanges in one order.
        if action.op is Op.UPDATE:
            return True
        return action.stage in self._pending.stages and action.version >= self._pending.version

    def _resume(self, pending: _Pending) -> None:
        try:
            pending.awaited = next(pending.phases)
        except StopIteration:
            self._pending = None

    def _phases(self, unit: Sequence[_Gathered]) -> Generator[Exchange[Any], None, None]:
        verdict = yield from self._judge(unit)
        if verdict.stop:
            self._end_before_reader_of(unit[0].version)
        spreading: list[tuple[_Gathered, Replica, Exchange[None]]] = []
        for gathered in unit:
            weights = self._stages[gathered.stage].weights
            replica = weights.oldest() if self._data.size > 1 else None
            self._apply(gathered, verdict)
            if replica is not None:
                exchange = self._data.spread(replica.flat, weights.ownership.bounds)
                spreading.append((gathered, replica, exchange))
        for gathered, replica, exchange in spreading:
            yield exchange
            with self._stages[gathered.stage].weights.completing(replica, version=gathered.version):
                exchange.take()

    def _judge(self, unit: Sequence[_Gathered]) -> Generator[Exchange[Any], None, _Verdict]:
        """Add up the gradients, and agree with the other ranks on what to clip by and whether to step.

        The verdict is made where the gradients are, and the host must know it before it launches the step. On
        a GPU its numbers are copied to the host as the last phase, and the rank asks between two actions
        whether they have come, as it does with exchanges; only when the update is due does it wait for them.
        The host runs ahead by few actions (`stages.clock.AHEAD`), so where the slack is longer than these it
        has the verdict in time and the device always has work. Where there is none (a flush, an unstashed
        schedule) the device idles once an update, for as long as a launch takes.
        """
        squares = []
        for gathered in unit:
            yield gathered.reduction
            gathered.reduction.take()
            self._stages[gathered.stage].update.prepare(gathered.gradient)
            squares.append(squared_norm(gathered.gradient))
        stop = torch.full_like(squares[0], float(self._rules.common_step and self._stop()))
        losses = [loss for gathered in unit for loss in gathered.losses]
        train_loss = torch.stack(losses).double().mean() if losses else torch.zeros_like(stop)
        if self._data.size > 1:
            shared = self._data.share(torch.stack([*squares, stop, train_loss]))
            yield shared
            *squares, stop, train_loss = sum_in_order(shared.take()).unbind()
            train_loss = train_loss / self._data.size
        verdict = [train_loss, *squares]
        if self._rules.common_step:
            common = self._pipeline.share(torch.stack([*squares, stop]))
            yield common
            of_ranks = common.take()
            stop = sum_in_order([of_rank[-1] for of_rank in of_ranks])
            verdict += [sum_in_order(self._by_stage(of_ranks)), stop]
        coming = to_host(torch.stack(verdict))
        yield coming
        loss, *numbers = coming.take()
        own, common_numbers = numbers[: len(unit)], numbers[len(unit) :]
        total, told = common_numbers or (None, 0.0)
        return _Verdict(
            squares={gathered.stage: square for gathered, square in zip(unit, own, strict=True)},
            total=total,
            train_loss=loss,
            stop=told > 0,
        )

    def _by_stage(self, of_ranks: Sequence[Tensor]) -> list[Tensor]:
        """The first numbers of each rank, one for each of its stages, in the order of the stages."""
        numbers = [iter(of_rank) for of_rank in of_ranks]
        return [next(numbers[rank]) for rank in self._program.rank_of_stage]

    def _apply(self, gathered: _Gathered, verdict: _Verdict) -> None:
        stage, version = gathered.stage, gathered.version
        square = verdict.squares[stage]
        judged = square if verdict.total is None else verdict.total
        clip_by = {"global": verdict.total, "stage": square, "none": None}[self._rules.clip]
        step = (version * self._program.update_interval - 1) // self._program.microbatches
        started = self._clock.mark()
        result = self._stages[stage].update.apply(
            gathered.gradient,
            version=version,
            step=step,
            clip_by=clip_by,
            finite=math.isfinite(judged),
        )
        self._clock.measure(
            started, partial(self._trace.note_action, Action(stage, Op.UPDATE, NO_MICROBATCH, version))
        )
        self._skipped[stage] = self._skipped[stage] + 1 if result.skipped else 0
        if self._skipped[stage] == self._rules.max_skipped > 0 and self._trace.gave_up is None:
            self._give_up(stage, version)
        if stage == self._program.num_stages - 1:
            # The verdict followed from that backward, so its time is known by now.
            self._clock.settle()
            self._on_step(
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

        No rank has begun that step: to begin it, it must have finished this update, and so know of the end.
        """
        if self._ending:
            return
        self._ending = True
        m = self._program.microbatches
        readers = (a for a in self._program.all_actions() if a.op is Op.FORWARD and a.version >= version)
        self.end_step = min((action.microbatch // m for action in readers), default=self.end_step)
