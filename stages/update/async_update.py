"""The updates of a rank, completed in the pipeline's slack.

Between two phases of an update (`stages.update.update_phases`) the rank goes on with its actions; only an
action that needs the update waits for it.

On a GPU the device waits for exchanges, on a stream of the updates' own: all phases up to the verdict are
launched at once, and all after it as soon as the host, which looks between two actions, knows the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from schedules.actions import ADDING_NOTHING, Action, Op, Program
from schedules.dependencies import Place, after_own_update, launched, places_to_agree
from stages.comm.collectives import Exchange, Reduction
from stages.model.gradients.whole_gradients import WholeGradients
from stages.update.rank_stats import RankTrace
from stages.update.update_phases import Gathered, UpdateContext, UpdatePhases
from stages.update.update_stream import Streams, to_host
from stages.weights.flat_buffers import GradientBuffer

T = TypeVar("T")

MOST_COMMON_NUMBERS = 3
"""Numbers that a host reads before a step, beside one for each of its stages."""
COPIES = 8
"""Copies to the host at a time: one of a verdict, the others of flags (`update_phases.Agreement`)."""


def needs_update(action: Action, *, stages: Collection[int], version: int) -> bool:
    """Whether the update of `stages` to `version` must be complete before `action`.

    There is one update at a time, so that all data ranks begin their exchanges in the same order.
    """
    return action.op is Op.UPDATE or (action.stage in stages and action.version >= version)


@dataclass(frozen=True)
class Slack:
    """Facts of the actions between a rank's updates and the first actions that need them."""

    early: frozenset[Action]
    """Last backwards of updates that the next action needs; the reduction begins within them."""
    any: bool
    """Whether any update has other actions before the first that needs it."""


def slack_of(program: Program, rank: int, *, common_step: bool) -> Slack:
    """The slack of a rank's updates.

    A schedule that flushes has no other actions after its last backward behind which the reduction could
    hide: it begins within that backward.

    Args:
        program: of the segment.
        rank: that updates.
        common_step: whether the stages of a rank update together.
    """
    actions = program.actions[rank]
    here = {action.stage for action in actions}
    early: set[Action] = set()
    any_slack = False
    last: dict[int, tuple[int, Action]] = {}
    unit: dict[int, tuple[int, Action]] = {}
    pending: tuple[frozenset[int], int] | None = None
    finished = 0
    for place, action in enumerate(actions):
        if pending is not None and needs_update(action, stages=pending[0], version=pending[1]):
            pending, finished = None, place
        if action.op is Op.UPDATE:
            unit[action.stage] = last[action.stage]
            if common_step and len(unit) < len(here):
                continue
            pending = frozenset(unit), action.version
            following = actions[place + 1] if place + 1 < len(actions) else None
            if following is not None and not needs_update(following, stages=pending[0], version=pending[1]):
                any_slack = True
            elif all(at >= finished for at, _ in unit.values()):
                early.update(backward for _, backward in unit.values())
            unit = {}
        elif action.op not in ADDING_NOTHING:
            last[action.stage] = place, action
    return Slack(frozenset(early), any_slack)


@dataclass
class _Pending:
    unit: Sequence[Gathered]
    """Kept until the update is done: on a GPU its memory must not be reused before."""
    phases: Generator[Exchange[Any], None, None]
    sole_buffers: frozenset[int]
    """Stages of the unit whose next backward adds into the gradient that the update reads and clears."""
    ahead: int
    """First micro-batch of the update after the next. Where its gradient of a tied head's shard begins before
    the next update, it is added into the buffer that this update reads and clears."""
    awaited: Exchange[Any] | None = None
    end: Any = None
    """Its end on the updates' stream, once all of it is launched."""

    def is_needed(self, action: Action) -> bool:
        stages = [gathered.stage for gathered in self.unit]
        adds_into_it = action.op not in ADDING_NOTHING and action.stage in self.sole_buffers
        adds_into_it |= action.op is Op.HEAD_WEIGHT and action.microbatch >= self.ahead
        return adds_into_it or needs_update(action, stages=stages, version=self.unit[0].version)


class RankUpdates:
    """The updates of one rank, one at a time.

    In a schedule whose stages update together, the stages of a rank are one update.

    Args:
        context: of the rank.
        streams: of the device that computes.
    """

    def __init__(self, context: UpdateContext, *, streams: Streams) -> None:
        self._stages = context.stages
        self._pipeline, self._data = context.connection.pipeline, context.connection.data
        self._rules = context.rules
        self._waits = context.connection.links.waits
        """Whether this rank blocks until an exchange completes; if not, other ranks of its process run."""
        self._clock = context.clock
        self._update_clock = context.clock.beside()
        self._streams = streams
        self._gathered: list[Gathered] = []
        self._early: dict[int, Reduction] = {}
        self._sharded: dict[int, Reduction] = {}
        """By stage, the latest reduction of a buffer that the next step's backwards accumulate in, too."""
        self._cleared: dict[int, Any] = {}
        """By stage, the point on the updates' stream from which on its buffer is free for them."""
        self._pending: _Pending | None = None
        self._launched: _Pending | None = None
        """An update that is launched on the device and may not have completed."""
        self._phases = UpdatePhases(context, update_clock=self._update_clock)

    @property
    def end_step(self) -> int:
        """The step before which the segment ends; earlier than the program's once a rank is asked to stop."""
        return self._phases.end_step

    def rehearse(self, programs: Sequence[Program]) -> None:
        """Take a temporary step of every stage, and copy as many numbers to the host as updates do, on the
        stream that the updates run on: it has memory of its own.

        Args:
            programs: of the run's segments, one of each kind.
        """
        rank, common_step = self._pipeline.rank, self._rules.common_step
        beside = any(slack_of(program, rank, common_step=common_step).any for program in programs)
        self._streams.fork()
        with self._streams.beside() if beside else nullcontext():
            for state in self._stages.values():
                state.update.rehearse()
            like = next(iter(self._stages.values())).weights.gradient_buffer.flat
            # Pinned memory is reused for sizes up to the same power of two.
            most = len(self._stages) + MOST_COMMON_NUMBERS
            sizes = [2**power for power in range((most - 1).bit_length() + 1)]
            copies = [
                to_host(like.new_zeros(size, dtype=torch.float64)) for size in sizes for _ in range(COPIES)
            ]
            for copy in copies:
                copy.wait()
        self._streams.join(self._streams.point())

    def connect(self) -> None:
        """Make every exchange of an update once, in its real size. Nothing changes: gradients are zero, and
        all data ranks hold the same weights."""
        unit = len(self._stages) if self._rules.common_step else 1
        for state in self._stages.values():
            weights = state.weights
            gradient = weights.gradient_buffer
            for early in (False, True):
                reduction = weights.reduce(self._data, gradient, early=early)
                reduction.advance(len(gradient.views))
                reduction.complete()
            numbers = gradient.flat.new_zeros(unit + 2, dtype=torch.float64)
            stages = self._stages.values() if self._rules.common_step else (state,)
            counts = sum(other.weights.gradient_buffer.loads.numel() for other in stages)
            self._data.all_gather(numbers.new_zeros(unit + 2 + counts)).complete()
            weights.hand_out(self._data, weights.newest()).complete()
            shared = numbers[1:] if self._rules.common_step else numbers[:1]
            self._pipeline.all_gather(shared).complete()

    def begin(self, program: Program, trace: RankTrace) -> None:
        """Prepare for a segment; its measurements go to `trace`."""
        # Without shards all of it comes before the update itself.
        self._places = places_to_agree(program, self._pipeline.rank) if program.head_shards else {}
        self._place, self._interval = launched(0), program.update_interval
        self._trace = trace
        postponed = self._rules.common_step and self._data.size > 1
        self._after_own = after_own_update(program, self._pipeline.rank) if postponed else frozenset[Action]()
        slack = slack_of(program, self._pipeline.rank, common_step=self._rules.common_step)
        self._begin_early = slack.early if self._data.size > 1 else frozenset[Action]()
        # Without slack nothing runs beside the updates, and a second stream would only take memory.
        self._beside = self._streams.parallel and slack.any
        self._update_clock.begin()
        self._phases.begin(program, trace)

    def last_backward(self, action: Action) -> WholeGradients | None:
        """Observer of a backward's gradients, for a last backward within which the reduction begins."""
        weights = self._stages[action.stage].weights
        if action not in self._begin_early or not weights.reduces_early:
            return None
        reduction = self._reduction(action.stage, weights.gradient_buffer, early=True)
        self._early[action.stage] = reduction
        return WholeGradients(weights.replica_of(action.version).parameters, advance=reduction.advance)

    def add(self, action: Action, gradient: GradientBuffer, losses: list[Tensor]) -> None:
        """Begin the update that `action` names, with the gradient and losses that its stage has gathered."""
        reduction = self._early.pop(action.stage, None)
        if reduction is None:
            reduction = self._reduction(action.stage, gradient, early=False)
        gathered = Gathered(
            stage=action.stage, version=action.version, gradient=gradient, losses=losses, reduction=reduction
        )
        if gradient.part is not None:
            self._sharded[action.stage] = reduction
        # Before the reduction begins, so that the time is known when the verdict is.
        self._clock.tell(gathered.began_at.append)
        reduction.advance(len(gradient.views))
        self._gathered.append(gathered)
        if self._rules.common_step and len(self._gathered) < len(self._stages):
            return
        unit = sorted(self._gathered, key=lambda gathered: gathered.stage)
        self._gathered = []
        stages = [gathered.stage for gathered in unit]
        self._pending = _Pending(
            unit=unit,
            phases=self._phases.run(
                unit, reduced=self._after_reduction, may_agree=self._place_of(unit[0].version)
            ),
            sole_buffers=frozenset(
                stage for stage in stages if len(self._stages[stage].weights.gradients) == 1
            ),
            ahead=(unit[0].version + 1) * self._interval,
        )
        self._resume(self._pending)
        self._resume_without_waiting()

    def _reduction(self, stage: int, gradient: GradientBuffer, *, early: bool) -> Reduction:
        """The reduction of a gradient, all of it on the updates' stream."""
        reduction = self._stages[stage].weights.reduce(self._data, gradient, early=early)
        streams = self._streams
        taken = False

        def beside(call: Callable[[], T]) -> Callable[[], T]:
            def call_beside() -> T:
                with streams.beside():
                    return call()

            return call_beside

        def advance(whole: int) -> None:
            streams.fork()
            with streams.beside():
                reduction.advance(whole)

        def take() -> None:
            nonlocal taken
            if taken:
                return
            taken = True
            with streams.beside():
                reduction.take()
                if gradient.part is not None:
                    gradient.flat.zero_()
                    self._cleared[stage] = streams.point()

        return Reduction(
            ready=beside(reduction.ready), wait=beside(reduction.wait), take=take, advance=advance
        )

    def _free_buffer(self, before: Action) -> Iterator[None]:
        """Wait until the buffer that a backward adds to has been reduced, if it is the only whole one."""
        if before.op in ADDING_NOTHING or before.op is Op.UPDATE or before.stage not in self._sharded:
            return
        reduction = self._sharded.pop(before.stage)
        started = self._clock.mark()
        while not reduction.ready():
            if self._waits:
                reduction.wait()
            else:
                yield
        reduction.take()
        self._streams.join(self._cleared.pop(before.stage))
        self._clock.measure(started, self._trace.note_wait_for_update)

    def _place_of(self, version: int) -> Exchange[None]:
        """Complete once the rank is at a place where the exchange of all ranks can complete.

        On a GPU an exchange that waits for work which this rank has yet to launch would hold up its host
        where that synchronizes with the device, as a receive would (`schedules.dependencies`).
        """
        place = self._places.get(version, launched(0))

        def wait() -> None:
            raise RuntimeError(f"update {version} is needed before place {place}, which it depends on")

        return Exchange(ready=lambda: self._place >= place, wait=wait, take=lambda: None)

    def go_on(self, *, before: Action | None, place: Place) -> Iterator[None]:
        """Continue the pending update as far as its exchanges have completed.

        Complete it if the action `before` needs it, or at a drain (None); give this rank's part of it if the
        action waits for ranks that need that. Yields where this rank would have
        to wait and other ranks of its process may run.

        Args:
            before: the next action.
            place: that the rank has reached.
        """
        self._place = place
        self._resume_without_waiting()
        if before is not None:
            yield from self._free_buffer(before)
        while self._pending is not None:
            if before is not None and not self._pending.is_needed(before) and not self._must_agree(before):
                return
            if not self._waits:
                yield
            else:
                assert self._pending.awaited is not None
                started = self._clock.mark()
                with self._stream():
                    self._pending.awaited.wait()
                self._clock.measure(started, self._trace.note_wait_for_update)
                self._resume(self._pending)
            self._resume_without_waiting()
        launched = self._launched
        if launched is not None and (before is None or launched.is_needed(before)):
            started = self._clock.mark()
            self._streams.join(launched.end)
            self._clock.measure(started, self._trace.note_wait_for_update)
            self._launched = None
        agreement = self._phases.agreement
        while (awaited := agreement.go_on(before=before)) is not None:
            if not self._waits:
                yield
                continue
            awaited.wait()
            agreement.heard()
        if before is None:
            self._update_clock.finish()

    def _must_agree(self, before: Action) -> bool:
        """Whether an action waits for ranks that wait for this one's part of the pending update."""
        assert self._pending is not None
        return before in self._after_own and self._phases.agreeing < self._pending.unit[0].version

    def _resume_without_waiting(self) -> None:
        while self._pending is not None and self._pending.awaited is not None:
            awaited = self._pending.awaited
            with self._stream():
                ready = awaited.device_waits or awaited.ready()
            if not ready:
                return
            self._resume(self._pending)

    def _stream(self) -> AbstractContextManager[Any]:
        return self._streams.beside() if self._beside else nullcontext()

    def _resume(self, pending: _Pending) -> None:
        with self._stream():
            try:
                pending.awaited = next(pending.phases)
            except StopIteration:
                self._pending = None
        if self._pending is None and self._beside:
            pending.end = self._streams.point()
            self._launched = pending

    def _after_reduction(self) -> None:
        if self._data.size > 1 and not self._beside:
            self._streams.join(self._streams.point())
