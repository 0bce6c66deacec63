"""What one update does, in phases between which it waits for an exchange: reduce the gradient over the data
ranks, agree with the pipeline's ranks, step, and broadcast the new weights from their owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from schedules.actions import NO_MICROBATCH, Action, Op, Program
from stages.comm.collectives import Exchange, Group
from stages.liveness.stop_signal import never
from stages.update.agreed_end import Agreement
from stages.update.clock import Clock
from stages.update.optimizer_step import StageState
from stages.update.rank_stats import RankTrace, StepResult
from stages.update.step_decision import Gathered, UpdateRules, Verdict, judge
from stages.weights.weight_versions import Replica


@dataclass(frozen=True, kw_only=True)
class UpdateContext:
    """What the updates of a rank work with."""

    stages: Mapping[int, StageState]
    """Stages of the rank, by number."""
    pipeline: Group
    """The ranks of this rank's pipeline, in order."""
    data: Group
    """The data ranks that hold the same stages."""
    rules: UpdateRules
    clock: Clock
    """Clock of the device that computes."""
    on_step: Callable[[StepResult], None]
    """Called with each update of the last stage."""
    stop: Callable[[], bool]
    """Whether this process has been asked to stop."""


class UpdatePhases:
    """The work of a rank's updates, and the step before which they end.

    Args:
        context: of the rank.
        update_clock: of the updates; the context's is of the actions.
    """

    def __init__(self, context: UpdateContext, *, update_clock: Clock) -> None:
        self._stages = context.stages
        self._pipeline = context.pipeline
        self._data = context.data
        self._rules = context.rules
        self._clock = context.clock
        self._update_clock = update_clock
        self._on_step = context.on_step
        self._stop = context.stop
        self._skipped = dict.fromkeys(context.stages, 0)
        self.agreement = Agreement(context.pipeline, end=self._end_before)

    def begin(self, program: Program, trace: RankTrace) -> None:
        """Prepare for a segment; its measurements go to `trace`."""
        self._program = program
        self._trace = trace
        self._ending = False
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
            reduced=reduced,
            may_agree=may_agree,
        )
        if not self._rules.common_step and not left:
            self.agreement.tell(step - 1, stop=verdict.stop, device=unit[0].gradient.flat.device)
        elif verdict.stop:
            self._end_before_reader_of(version)
        broadcasts: list[tuple[Gathered, Replica, Exchange[None]]] = []
        for gathered in unit:
            weights = self._stages[gathered.stage].weights
            replica = weights.oldest() if self._data.size > 1 else None
            self._apply(gathered, verdict)
            if replica is not None:
                exchange = self._data.broadcast(replica.flat, weights.ownership.runs)
                broadcasts.append((gathered, replica, exchange))
        for gathered, replica, exchange in broadcasts:
            yield exchange
            with self._stages[gathered.stage].weights.receiving_others(replica, version=gathered.version):
                exchange.take()

    def _apply(self, gathered: Gathered, verdict: Verdict) -> None:
        stage, version = gathered.stage, gathered.version
        step = (version * self._program.update_interval - 1) // self._program.microbatches
        started = self._update_clock.mark()
        result = self._stages[stage].update.apply(
            gathered.gradient,
            version=version,
            step=step,
            clip_by=verdict.clip_by(stage, self._rules),
            finite=math.isfinite(verdict.judged(stage)),
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
