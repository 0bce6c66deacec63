"""Runs a rank's list of actions, whatever schedule it came from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from schedules.actions import Action, Op, Program
from schedules.dependencies import launched, updated
from schedules.messages import Message, received, sent
from stages.clock import Clock
from stages.connection import Connection
from stages.data import Batches
from stages.model import next_token_loss
from stages.pending import RankUpdates
from stages.split_backward import DeferredGradients, deferring
from stages.streams import Streams
from stages.timeline import kept_actions
from stages.trace import RankTrace, StageTrace, StepResult
from stages.update import StageState
from stages.verdict import UpdateRules
from stages.weights import Replica


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
class _Half:
    """What the first half of a backward leaves for the second."""

    deferred: DeferredGradients
    version: int
    gradient: Tensor | None
    """That was received; the weight gradients may need it."""


class RankExecutor:
    """Performs the actions of one rank.

    Args:
        rank: whose actions.
        stages: the stages of that rank, by number.
        connection: to the other ranks.
        batches: where tokens and targets come from.
        rules: how updates are made.
        clock: of the device that computes.
        streams: its queues.
        on_step: called with each update of the last stage, on the ranks that have it.
        stop: whether this rank has been told to end. Where all stages update together, all ranks then end the
            segment early, after the same step.
    """

    def __init__(
        self,
        *,
        rank: int,
        stages: Mapping[int, StageState],
        connection: Connection,
        batches: Batches,
        rules: UpdateRules,
        clock: Clock,
        streams: Streams,
        on_step: Callable[[StepResult], None],
        stop: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._links = connection.links
        self._data_ranks = connection.data.size
        self._data_rank = connection.data.rank
        self._batches = batches
        self._clock = clock
        self._updates = RankUpdates(
            stages=stages,
            pipeline=connection.pipeline,
            data=connection.data,
            rules=rules,
            waits=connection.links.waits,
            clock=clock,
            streams=streams,
            on_step=on_step,
            stop=stop,
        )
        self.acted_at = 0.0
        """Clock when the latest action began, seconds."""
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._halves: dict[tuple[int, int], _Half] = {}
        self._losses: list[Tensor] = []

    def connect(self) -> None:
        """Make every connection to other processes that a segment uses. All ranks call this together, before
        their first segment: later, a rank that waits for a connection would keep others waiting."""
        self._links.connect()
        self._updates.connect()

    @property
    def end_step(self) -> int:
        """The step before which the segment ends; earlier than the program's once a rank is told to end."""
        return self._updates.end_step

    def run(self, program: Program) -> Iterator[None]:
        """Perform the segment; yields where another rank of this process must go on first."""
        self._program = program
        self._last_stage = program.num_stages - 1
        self._loss_share = program.update_interval * self._data_ranks
        self.trace = RankTrace(
            stages={stage: StageTrace() for stage in self._stages},
            latest=deque(maxlen=self._timed_actions(program)),
        )
        self.in_flight: dict[int, set[tuple[int, int]]] = {stage: set() for stage in self._stages}
        """For each stage, how many micro-batches were in flight at a time: whole ones, and ones whose
        weight half was still to come."""
        self._split = {a.stage for a in program.actions[self._rank] if a.op is Op.BACKWARD_INPUT}
        self._links.begin(program)
        self._clock.begin()
        self._updates.begin(program, self.trace)
        for number, action in enumerate(program.actions[self._rank]):
            self._links.passed(launched(number))
            yield from self._updates.go_on(before=action)
            self._links.passed(updated(number))
            if self._is_cut_off(action):
                continue
            self.acted_at = time.perf_counter()
            if action.op is Op.UPDATE:
                self._begin_update(action)
                continue
            started = self._clock.mark()
            if action.op is Op.FORWARD:
                yield from self._forward(action)
            elif action.op is Op.BACKWARD or action.op is Op.BACKWARD_INPUT:
                yield from self._backward(action)
            else:
                self._backward_weight(action)
            self._clock.measure(started, partial(self.trace.note_action, action))
        yield from self._updates.go_on(before=None)
        self._clock.finish()
        left = sorted(self._saved) + sorted(self._halves)
        if left:
            raise RuntimeError(f"micro-batches without a whole backward at the drain: {left}")

    def _timed_actions(self, program: Program) -> int:
        """Of how many actions the times are kept: none where ranks take turns, and of one pipeline alone."""
        if not self._links.waits or self._data_rank:
            return 0
        return kept_actions(len(program.actions[self._rank]), steps=program.steps)

    def _is_cut_off(self, action: Action) -> bool:
        if action.op is Op.UPDATE:
            return action.version * self._program.update_interval > self.end_step * self._program.microbatches
        return action.microbatch >= self.end_step * self._program.microbatches

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
            output = loss / self._loss_share
        else:
            self._links.send(message, output.detach())
        replica.pending_backwards += 1
        self._saved[stage, microbatch] = _Saved(
            given, output, replica, replica.version, replica.writes, deferred
        )
        self._count_in_flight(stage)

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
        whole = self._updates.last_backward(action)
        watching = nullcontext() if whole is None else whole.watching()
        with update.at_backward(saved.replica, mismatch=mismatch), watching:
            torch.autograd.backward(saved.output, gradient)
        if gradient is not None and saved.deferred is None:
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
            self._halves[stage, microbatch] = _Half(saved.deferred, saved.version, gradient)
        self._count_in_flight(stage)
        trace = self.trace.stages[stage]
        trace.mismatch_max = max(trace.mismatch_max, mismatch)

    def _backward_weight(self, action: Action) -> None:
        half = self._halves.pop((action.stage, action.microbatch))
        half.deferred.compute(self._updates.last_backward(action))
        if half.gradient is not None:
            self._links.release(half.gradient)
        self._stages[action.stage].weights.gathering.versions.append(half.version)
        self._count_in_flight(action.stage)

    def _count_in_flight(self, stage: int) -> None:
        wholes = sum(replica.pending_backwards for replica in self._stages[stage].weights.replicas)
        halves = sum(of_stage == stage for of_stage, _ in self._halves) if stage in self._split else 0
        self.in_flight[stage].add((wholes, halves))

    def _begin_update(self, action: Action) -> None:
        stage = action.stage
        gradient = self._stages[stage].weights.take_gradient()
        # Counted from the versions that forwards really read, not from the program.
        self.trace.stages[stage].note_delays([action.version - 1 - read for read in gradient.versions])
        losses: list[Tensor] = []
        if stage == self._last_stage:
            losses, self._losses = self._losses, []
        if stage == max(self._stages):
            self._clock.tell(self.trace.note_update)
        self._updates.add(action, gradient, losses)

    def _receive(self, message: Message) -> Generator[None, None, Tensor]:
        while not self._links.waits and not self._links.arrived(message):
            yield
        started = self._clock.mark()
        tensor = self._links.receive(message)
        self._clock.measure(started, self.trace.note_wait)
        return tensor
