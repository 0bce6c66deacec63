"""The updates of a rank from the gathered gradient to the new weights, finished in the pipeline's slack.

An update goes through phases: add the gradient over the data ranks, exchange its norm, step, spread what was
written. Between two phases it waits for an exchange, and the rank goes on with its actions meanwhile. Only an
action that cannot do without the update makes it finish.

On a GPU it is the device that waits for exchanges, in a queue of the updates' own: all phases up to the
verdict are launched at once, and all after it as soon as the host, which looks between two actions, knows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from schedules.actions import NO_MICROBATCH, Action, Op, Program
from stages.clock import Clock
from stages.early import WholeGradients, needs_update, slack_of
from stages.ending import Agreement
from stages.groups import Exchange, Group, Reduction
from stages.signals import never
from stages.streams import Streams
from stages.trace import RankTrace, StepResult
from stages.update import StageState
from stages.verdict import Gathered, UpdateRules, Verdict, judge
from stages.weights import GradientBuffer, Replica

T = TypeVar("T")


@dataclass
class _Pending:
    unit: Sequence[Gathered]
    """Kept until it is done: on a GPU what it reads must not be given to others before."""
    phases: Generator[Exchange[Any], None, None]
    awaited: Exchange[Any] | None = None

    def is_needed(self, action: Action) -> bool:
        stages = [gathered.stage for gathered in self.unit]
        return needs_update(action, stages=stages, version=self.unit[0].version)


@dataclass(frozen=True)
class _Launched:
    """An update that the device has still to do."""

    pending: _Pending
    end: Any
    """Its end in the updates' queue."""


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
        streams: its queues.
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
        streams: Streams,
        on_step: Callable[[StepResult], None],
        stop: Callable[[], bool],
    ) -> None:
        self._stages = stages
        self._pipeline = pipeline
        self._data = data
        self._rules = rules
        self._waits = waits
        self._clock = clock
        self._own_clock = clock.beside()
        self._streams = streams
        self._on_step = on_step
        self._stop = stop
        self._gathered: list[Gathered] = []
        self._early: dict[int, Reduction] = {}
        self._pending: _Pending | None = None
        self._launched: _Launched | None = None
        self._skipped = dict.fromkeys(stages, 0)
        self._agreement = Agreement(pipeline, end=self._end_before)

    def connect(self) -> None:
        """Make every exchange of an update once, of the real size, and change nothing by it: gradients are
        zero, and all data ranks hold the same weights."""
        unit = len(self._stages) if self._rules.common_step else 1
        for state in self._stages.values():
            weights = state.weights
            gradient = weights.gathering
            for early in (False, True):
                reduction = self._data.reduce(gradient.flat, weights.reduction, early=early)
                reduction.advance(len(gradient.views))
                _complete(reduction)
            numbers = gradient.flat.new_zeros(unit + 2, dtype=torch.float64)
            _complete(self._data.share(numbers))
            _complete(self._data.spread(weights.newest().flat, weights.ownership.bounds))
            if self._rules.common_step:
                _complete(self._pipeline.share(numbers[1:]))
            else:
                _complete(self._pipeline.share(numbers[:1]))

    def begin(self, program: Program, trace: RankTrace) -> None:
        """Make ready for a segment, and for what is measured in it."""
        self._program = program
        self._trace = trace
        self._ending = False
        self.end_step = program.first_step + program.steps
        """The step before which the segment ends; earlier than the program's once a rank is told to end."""
        slack = slack_of(program, self._pipeline.rank, common_step=self._rules.common_step)
        self._begin_early = slack.early if self._data.size > 1 else frozenset[Action]()
        # Without slack there is nothing to go beside, and one queue uses the memory of the other's work.
        self._beside = self._streams.parallel and slack.any
        self._own_clock.begin()
        self._agreement.begin(program)

    def last_backward(self, action: Action) -> WholeGradients | None:
        """To be told of gradients that a backward makes whole, where their reduction begins within it."""
        if action not in self._begin_early:
            return None
        weights = self._stages[action.stage].weights
        reduction = self._reduction(action.stage, weights.gathering, early=True)
        self._early[action.stage] = reduction
        return WholeGradients(weights.holding(action.version).parameters, advance=reduction.advance)

    def add(self, action: Action, gradient: GradientBuffer, losses: list[Tensor]) -> None:
        """Begin the update that `action` names, with what its stage has gathered."""
        reduction = self._early.pop(action.stage, None)
        if reduction is None:
            reduction = self._reduction(action.stage, gradient, early=False)
        gathered = Gathered(
            stage=action.stage, version=action.version, gradient=gradient, losses=losses, reduction=reduction
        )
        # Before the reduction is, so that the time is known when the verdict that follows from it is.
        self._clock.tell(gathered.began_at.append)
        reduction.advance(len(gradient.views))
        self._gathered.append(gathered)
        if self._rules.common_step and len(self._gathered) < len(self._stages):
            return
        unit = sorted(self._gathered, key=lambda gathered: gathered.stage)
        self._gathered = []
        self._pending = _Pending(unit=unit, phases=self._phases(unit))
        self._resume(self._pending)
        self._resume_without_waiting()

    def _reduction(self, stage: int, gradient: GradientBuffer, *, early: bool) -> Reduction:
        """The reduction of a gradient, all of it in the updates' queue."""
        plan = self._stages[stage].weights.reduction
        reduction = self._data.reduce(gradient.flat, plan, early=early)
        streams = self._streams

        def beside(call: Callable[..., T]) -> Callable[..., T]:
            def there(*given: int) -> T:
                with streams.beside():
                    return call(*given)

            return there

        def advance(whole: int) -> None:
            streams.fork()
            with streams.beside():
                reduction.advance(whole)

        return Reduction(
            ready=beside(reduction.ready),
            wait=beside(reduction.wait),
            take=beside(reduction.take),
            advance=advance,
        )

    def go_on(self, *, before: Action | None) -> Iterator[None]:
        """Go on with the update under way as far as its exchanges have come; finish it where `before` cannot
        do without it, or where nothing is to come (None)."""
        self._resume_without_waiting()
        while self._pending is not None:
            if before is not None and not self._pending.is_needed(before):
                return
            if not self._waits:
                yield
            else:
                assert self._pending.awaited is not None
                started = self._clock.mark()
                with self._queue():
                    self._pending.awaited.wait()
                self._clock.measure(started, self._trace.note_wait_for_update)
                self._resume(self._pending)
            self._resume_without_waiting()
        launched = self._launched
        if launched is not None and (before is None or launched.pending.is_needed(before)):
            started = self._clock.mark()
            self._streams.join(launched.end)
            self._clock.measure(started, self._trace.note_wait_for_update)
            self._launched = None
        while (awaited := self._agreement.go_on(before=before)) is not None:
            if not self._waits:
                yield
                continue
            awaited.wait()
            self._agreement.heard()
        if before is None:
            self._own_clock.finish()

    def _resume_without_waiting(self) -> None:
        while self._pending is not None and self._pending.awaited is not None:
            awaited = self._pending.awaited
            with self._queue():
                ready = awaited.device_waits or awaited.ready()
            if not ready:
                return
            self._resume(self._pending)

    def _queue(self) -> AbstractContextManager[Any]:
        return self._streams.beside() if self._beside else nullcontext()

    def _resume(self, pending: _Pending) -> None:
        with self._queue():
            try:
                pending.awaited = next(pending.phases)
            except StopIteration:
                self._pending = None
        if self._pending is None and self._beside:
            self._launched = _Launched(pending, self._streams.point())

    def _phases(self, unit: Sequence[Gathered]) -> Generator[Exchange[Any], None, None]:
        version, interval = unit[0].version, self._program.update_interval
        # Ranks end after whole steps.
        step, left = divmod(version * interval, self._program.microbatches)
        verdict = yield from judge(
            unit,
            stages=self._stages,
            rank_of_stage=self._program.rank_of_stage,
            pipeline=self._pipeline,
            data=self._data,
            rules=self._rules,
            stop=never if left else self._stop,
            reduced=self._after_reduction,
        )
        if not self._rules.common_step and not left:
            self._agreement.tell(step - 1, stop=verdict.stop, device=unit[0].gradient.flat.device)
        elif verdict.stop:
            self._end_before_reader_of(version)
        spreading: list[tuple[Gathered, Replica, Exchange[None]]] = []
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

    def _after_reduction(self) -> None:
        if self._data.size > 1 and not self._beside:
            self._streams.join(self._streams.point())

    def _apply(self, gathered: Gathered, verdict: Verdict) -> None:
        stage, version = gathered.stage, gathered.version
        step = (version * self._program.update_interval - 1) // self._program.microbatches
        started = self._own_clock.mark()
        result = self._stages[stage].update.apply(
            gathered.gradient,
            version=version,
            step=step,
            clip_by=verdict.clip_by(stage, self._rules),
            finite=math.isfinite(verdict.judged(stage)),
        )
        self._own_clock.measure(
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
        self._end_before(min((action.microbatch // m for action in readers), default=self.end_step))

    def _end_before(self, step: int) -> None:
        self.end_step = min(self.end_step, step)


def _complete(exchange: Exchange[Any]) -> None:
    exchange.wait()
    exchange.take()
