"""Runs a rank's list of actions, whatever schedule it came from."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from schedules.actions import Action, Op, Program
from schedules.messages import Message, received, sent
from stages.data import Batches
from stages.model import next_token_loss
from stages.split_backward import DeferredGradients, deferring
from stages.transport import Links
from stages.update import StageUpdate, UpdateResult, squared_norm
from stages.weights import GradientBuffer, Replica, WeightVersions


@dataclass
class StageState:
    """A stage as its rank holds it."""

    weights: WeightVersions
    update: StageUpdate


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One update of the last stage, which is the one that knows the loss."""

    version: int
    train_loss: float
    """Mean over the micro-batches of the update, nats a token."""
    update: UpdateResult
    time: float
    """Clock at which the last backward of the step had been done, seconds."""


@dataclass
class StageTrace:
    """What a stage measured of itself in one segment."""

    delay_min: int | None = None
    delay_max: int | None = None
    mismatch_max: int = 0
    actions: dict[Op, tuple[int, float]] = field(default_factory=dict)
    """How many of each op were performed, and the seconds that they computed, waiting left out."""


@dataclass
class RankTrace:
    """What a rank measured of itself in one segment."""

    stages: dict[int, StageTrace] = field(default_factory=dict)
    update_times: list[float] = field(default_factory=list)
    """Clock at each update of its last stage, seconds."""
    update_waited: list[float] = field(default_factory=list)
    """Seconds spent waiting up to each of these."""

    @property
    def steady_seconds(self) -> float:
        """From the first update to the last: whole steps, without the pipeline's filling and draining."""
        return self.update_times[-1] - self.update_times[0] if len(self.update_times) > 1 else 0.0

    @property
    def busy(self) -> float | None:
        """Share of `steady_seconds` not spent waiting for others; None without two updates."""
        if self.steady_seconds <= 0:
            return None
        return 1 - (self.update_waited[-1] - self.update_waited[0]) / self.steady_seconds


@dataclass(frozen=True)
class _Saved:
    """What a forward leaves for its backward."""

    input: Tensor
    output: Tensor
    replica: Replica
    version: int
    writes: int
    """Into the replica's weights, up to the forward."""
    deferred: DeferredGradients | None
    """Where its weight gradients wait, if the backward comes in two halves."""


@dataclass(frozen=True)
class _PendingUpdate:
    """An update whose gradient is complete and whose norm is on its way."""

    gradient: GradientBuffer
    version: int
    losses: list[Tensor]
    time: float


class RankExecutor:
    """Performs the actions of one rank.

    Args:
        rank: whose actions.
        stages: the stages of that rank, by number.
        links: to the other ranks.
        batches: where tokens and targets come from.
        clip: `global`, `stage` or `none`.
        on_step: called with each update of the last stage, on the rank that has it.
        stop: whether this rank has been told to end. Where stages exchange norms, all ranks then end the
            segment early, after the same step.
    """

    def __init__(
        self,
        *,
        rank: int,
        stages: Mapping[int, StageState],
        links: Links,
        batches: Batches,
        clip: str,
        on_step: Callable[[StepResult], None],
        stop: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._links = links
        self._batches = batches
        self._clip = clip
        self._on_step = on_step
        self._stop = stop
        self.acted_at = 0.0
        """Clock when the latest action began, seconds."""
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._halves: dict[tuple[int, int], _Saved] = {}
        self._pending: dict[int, _PendingUpdate] = {}
        self._squares: dict[int, dict[int, Tensor]] = {}
        self._losses: list[Tensor] = []
        self._waited = 0.0

    def run(self, program: Program) -> Iterator[None]:
        """Perform the segment; yields where another rank of this process must go on first."""
        self._program = program
        self._last_stage = program.num_stages - 1
        self.trace = RankTrace(stages={stage: StageTrace() for stage in self._stages})
        self._split = {a.stage for a in program.actions[self._rank] if a.op is Op.BACKWARD_INPUT}
        self.end_step = program.first_step + program.steps
        """The step before which this segment ends; earlier than the program's once a rank is told to end."""
        self._ending = False
        self._links.begin(program)
        for action in program.actions[self._rank]:
            yield from self._finish_updates(before=action)
            if self._is_cut_off(action):
                continue
            started, waited = time.perf_counter(), self._waited
            self.acted_at = started
            if action.op is Op.FORWARD:
                yield from self._forward(action)
            elif action.op is Op.BACKWARD or action.op is Op.BACKWARD_INPUT:
                yield from self._backward(action)
            elif action.op is Op.BACKWARD_WEIGHT:
                self._backward_weight(action)
            else:
                self._begin_update(action)
                continue
            self._count(action.stage, action.op, started=started, waited=waited)
        for stage in list(self._pending):
            yield from self._finish_update(stage)
        left = sorted(self._saved) + sorted(self._halves)
        if left:
            raise RuntimeError(f"micro-batches without a whole backward at the drain: {left}")

    def _is_cut_off(self, action: Action) -> bool:
        if action.op is Op.UPDATE:
            return action.version * self._program.update_interval > self.end_step * self._program.microbatches
        return action.microbatch >= self.end_step * self._program.microbatches

    def _end_before_reader_of(self, version: int) -> None:
        """End the segment before the first step that reads `version`.

        No rank has begun that step: to begin it, it must have finished this update, and so know of the end.
        """
        m = self._program.microbatches
        readers = (a for a in self._program.all_actions() if a.op is Op.FORWARD and a.version >= version)
        self.end_step = min((action.microbatch // m for action in readers), default=self.end_step)

    def _count(self, stage: int, op: Op, *, started: float, waited: float) -> None:
        count, seconds = self.trace.stages[stage].actions.get(op, (0, 0.0))
        computed = time.perf_counter() - started - (self._waited - waited)
        self.trace.stages[stage].actions[op] = (count + 1, seconds + computed)

    def _forward(self, action: Action) -> Iterator[None]:
        stage, microbatch = action.stage, action.microbatch
        replica = self._stages[stage].weights.holding(action.version)
        activation = received(action, self._program.num_stages)
        if activation is None:
            given = self._batches.tokens(microbatch)
        else:
            given = (yield from self._receive(activation)).detach().requires_grad_()
        deferred = DeferredGradients() if stage in self._split else None
        with deferring(deferred):
            output = replica.module(given)
        message = sent(action, self._program.num_stages)
        if message is None:
            loss = next_token_loss(output, self._batches.targets(microbatch))
            self._losses.append(loss.detach())
            output = loss / self._program.update_interval
        else:
            self._links.send(message, output.detach())
        replica.pending_backwards += 1
        self._saved[stage, microbatch] = _Saved(
            given, output, replica, replica.version, replica.writes, deferred
        )

    def _backward(self, action: Action) -> Iterator[None]:
        stage, microbatch = action.stage, action.microbatch
        saved = self._saved.pop((stage, microbatch))
        weights, update = self._stages[stage].weights, self._stages[stage].update
        if weights.holding(action.version) is not saved.replica:
            raise RuntimeError(f"{action}: the forward ran on the replica of another version")
        if len(weights.replicas) > 1 and saved.replica.writes != saved.writes:
            # Autograd would not see it where the backward computes its activations anew.
            raise RuntimeError(f"{action}: its weights were written since the forward")
        incoming = received(action, self._program.num_stages)
        gradient = None if incoming is None else (yield from self._receive(incoming))
        mismatch = saved.replica.version - saved.version
        with update.at_backward(saved.replica, mismatch=mismatch):
            torch.autograd.backward(saved.output, gradient)
        if gradient is not None:
            self._links.release(gradient)
        outgoing = sent(action, self._program.num_stages)
        if outgoing is not None:
            assert saved.input.grad is not None
            self._links.send(outgoing, saved.input.grad)
            self._links.release(saved.input)
        saved.replica.pending_backwards -= 1
        if saved.deferred is None:
            weights.gathering.versions.append(saved.version)
        else:
            self._halves[stage, microbatch] = saved
        trace = self.trace.stages[stage]
        trace.mismatch_max = max(trace.mismatch_max, mismatch)

    def _backward_weight(self, action: Action) -> None:
        saved = self._halves.pop((action.stage, action.microbatch))
        assert saved.deferred is not None
        saved.deferred.compute()
        self._stages[action.stage].weights.gathering.versions.append(saved.version)

    def _begin_update(self, action: Action) -> None:
        stage, version = action.stage, action.version
        weights = self._stages[stage].weights
        gradient = weights.take_gradient()
        self._stages[stage].update.prepare(gradient)
        trace = self.trace.stages[stage]
        # Counted from the versions that forwards really read, not from the program.
        delays = [version - 1 - read for read in gradient.versions]
        trace.delay_min = min(delays if trace.delay_min is None else [trace.delay_min, *delays])
        trace.delay_max = max(delays if trace.delay_max is None else [trace.delay_max, *delays])
        losses: list[Tensor] = []
        if stage == self._last_stage:
            losses, self._losses = self._losses, []
        now = time.perf_counter()
        if stage == max(self._stages):
            self.trace.update_times.append(now)
            self.trace.update_waited.append(self._waited)
        pending = _PendingUpdate(gradient, version, losses, now)
        if self._clip == "global":
            squares = self._squares.setdefault(version, {})
            squares[stage] = squared_norm(gradient)
            self._pending[stage] = pending
            if len(squares) == len(self._stages):
                self._links.contribute(version, self._squares.pop(version), stop=self._stop())
        else:
            self._apply(stage, pending, squared_norm(gradient) if self._clip == "stage" else None)

    def _finish_updates(self, *, before: Action) -> Iterator[None]:
        """Finish the updates whose norm has come, and those that `before` cannot do without."""
        for stage, pending in list(self._pending.items()):
            needed = stage == before.stage and before.version >= pending.version
            if needed or (pending.version not in self._squares and self._links.contributed(pending.version)):
                yield from self._finish_update(stage)

    def _finish_update(self, stage: int) -> Iterator[None]:
        pending = self._pending.pop(stage)
        while not self._links.waits and not self._links.contributed(pending.version):
            yield
        started = time.perf_counter()
        total = self._links.total(pending.version)
        self._waited += time.perf_counter() - started
        if self._links.stop_asked(pending.version) and not self._ending:
            self._ending = True
            self._end_before_reader_of(pending.version)
        self._apply(stage, pending, total)

    def _apply(self, stage: int, pending: _PendingUpdate, square: Tensor | None) -> None:
        step = (pending.version * self._program.update_interval - 1) // self._program.microbatches
        started = time.perf_counter()
        result = self._stages[stage].update.apply(
            pending.gradient, version=pending.version, step=step, squared_norm=square
        )
        self._count(stage, Op.UPDATE, started=started, waited=self._waited)
        if stage == self._last_stage:
            loss = float(torch.stack(pending.losses).double().mean())
            self._on_step(
                StepResult(version=pending.version, train_loss=loss, update=result, time=pending.time)
            )

    def _receive(self, message: Message) -> Generator[None, None, Tensor]:
        while not self._links.waits and not self._links.arrived(message):
            yield
        started = time.perf_counter()
        tensor = self._links.receive(message)
        self._waited += time.perf_counter() - started
        return tensor
