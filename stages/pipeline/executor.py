"""Runs a rank's list of actions, whatever the schedule."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from schedules import analyze
from schedules.actions import Action, Op, Program
from schedules.dependencies import launched, updated
from schedules.messages import Kind, Message, received, sent
from stages.data.batches import Batches
from stages.liveness.watchdog import Waiting
from stages.model.gradients.split_backward import DeferredGradients, add_matrix
from stages.model.head_shard import HeadShard, ShardPass, merge_parts
from stages.pipeline.cuda_graphs import GraphedStage, updates_until_backward
from stages.pipeline.stage_pass import Pass, run_stage
from stages.pipeline.timeline import kept_actions
from stages.update.async_update import RankUpdates
from stages.update.rank_stats import RankTrace, StageTrace
from stages.update.update_phases import UpdateContext
from stages.update.update_stream import Streams
from stages.weights.weight_versions import Replica


@dataclass(frozen=True)
class _Saved:
    """State that a forward keeps for its backward."""

    passed: Pass
    replica: Replica
    version: int
    writes: int
    """Number of writes to the replica's weights before the forward."""
    loads: Sequence[Tensor]
    """Tokens by expert in each block of experts, counted in the forward."""


@dataclass(frozen=True)
class _Half:
    """State that the input half of a backward keeps for the weight half."""

    passed: Pass
    version: int
    loads: Sequence[Tensor]


@dataclass(frozen=True)
class _Head:
    """State that a shard of the head keeps for the gradient of its weights."""

    shard: HeadShard
    kept: ShardPass
    version: int


class RankExecutor:
    """Performs the actions of one rank.

    Args:
        context: of the rank: its stages, and what its updates work with.
        batches: source of tokens and targets.
        streams: the device's queues.
    """

    def __init__(self, context: UpdateContext, *, batches: Batches, streams: Streams) -> None:
        connection = context.connection
        self._rank = connection.rank
        self._stages = context.stages
        self._links = connection.links
        self._sharding, self._streams = connection.sharding, streams
        self._data_ranks = connection.data.size
        self._data_rank = connection.data.rank
        self._batches = batches
        self._clock = context.clock
        self._updates = RankUpdates(context, streams=streams)
        self.around: Callable[[Action], AbstractContextManager[object]] = lambda action: nullcontext()
        """Context in which an action is performed."""
        self.acted_at = 0.0
        """Clock when the latest action began, seconds."""
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._halves: dict[tuple[int, int], _Half] = {}
        self._heads: dict[tuple[int, int], _Head] = {}
        self._losses: list[Tensor] = []
        self._step: dict[int, int] = {}
        """By stage, the step that its current gradient buffer is of."""
        self._graphs: dict[int, GraphedStage] = {}
        """By stage, where they are captured."""
        self._updates_between: Mapping[tuple[int, int], int] = {}

    def rehearse(self, programs: Sequence[Program]) -> None:
        """Do once what a first step does once, before any receive is posted (`stages.pipeline.warm_up`).

        Args:
            programs: of the run's segments, one of each kind.
        """
        self._batches.rehearse()
        self._updates.rehearse(programs)

    def capture(self, programs: Sequence[Program], *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Capture CUDA graphs of the rank's stages, but for shards of the head, before `rehearse`.

        Args:
            programs: of the run's segments, one of each kind.
            shape: of an activation, `(batch, context, width)`.
            dtype: likewise.
        """
        for stage, state in self._stages.items():
            ops = {action.op for program in programs for action in program.stage_actions(stage)}
            if Op.FORWARD not in ops:
                continue
            self._graphs[stage] = GraphedStage(
                state.weights,
                slots=max(analyze(program).activations[stage] for program in programs),
                kinds=[False] * (Op.BACKWARD in ops) + [True] * (Op.BACKWARD_INPUT in ops),
                shape=shape,
                dtype=dtype,
            )

    def connect(self) -> None:
        """Open every connection to other processes that a segment uses. All ranks call this together, before
        their first segment: later, a rank that waits for a connection would hold up others."""
        self._links.connect()
        self._updates.connect()

    def waiting(self) -> Waiting | None:
        """The message that this rank waits for now, its host or its device; called from another thread."""
        waiting: Waiting | None = self._links.waiting() or self._clock.waiting()
        return waiting

    @property
    def end_step(self) -> int:
        """The step before which the segment ends; earlier than the program's after a requested stop."""
        return self._updates.end_step

    def run(self, program: Program) -> Iterator[None]:
        """Perform the segment; yields where another rank of this process must run first."""
        self._program = program
        self._loss_stage = program.loss_stage
        self._loss_share = program.update_interval * self._data_ranks
        self.trace = RankTrace(
            stages={stage: StageTrace() for stage in self._stages},
            latest=deque(maxlen=self._timed_actions(program)),
        )
        if self._sharding is not None:
            self._sharding.note_wait = self.trace.note_exchange
            self.trace.knows_waits = not self._streams.parallel
        self.in_flight: set[tuple[tuple[int, int], ...]] = set()
        """The counts of micro-batches in flight that occurred at one time: for each stage of the rank,
        ascending, (before their backward, between its halves)."""
        self._split = {
            (action.stage, action.microbatch)
            for action in program.actions[self._rank]
            if action.op is Op.BACKWARD_INPUT
        }
        if self._graphs:
            self._updates_between = updates_until_backward(program.actions[self._rank])
        self._step = dict.fromkeys(self._stages, program.first_step)
        self._links.begin(program)
        self._clock.begin()
        self._updates.begin(program, self.trace)
        for number, action in enumerate(program.actions[self._rank]):
            self._links.passed(launched(number))
            yield from self._updates.go_on(before=action, place=launched(number))
            self._links.passed(updated(number))
            if self._is_after_end(action):
                continue
            self.acted_at = time.perf_counter()
            if action.op is Op.UPDATE:
                self._begin_update(action)
                continue
            started = self._clock.mark()
            with self.around(action):
                if action.op is Op.FORWARD:
                    yield from self._forward(action)
                elif action.op is Op.HEAD:
                    yield from self._head(action)
                elif action.op is Op.HEAD_WEIGHT:
                    yield from self._head_weight(action)
                elif action.op is Op.EMBED:
                    self._embed(action)
                elif action.op is Op.EMBED_WEIGHT:
                    yield from self._embed_weight(action)
                elif action.op is Op.BACKWARD or action.op is Op.BACKWARD_INPUT:
                    yield from self._backward(action)
                else:
                    self._backward_weight(action)
            self._clock.measure(started, partial(self.trace.note_action, action))
        yield from self._updates.go_on(before=None, place=launched(len(program.actions[self._rank])))
        self._clock.finish()
        for state in self._stages.values():
            self.trace.loads |= state.update.tally.take()
        left = sorted({*self._saved, *self._halves, *self._heads})
        if left:
            raise RuntimeError(f"micro-batches without a whole backward at the drain: {left}")

    def _timed_actions(self, program: Program) -> int:
        """Number of most recent actions to timestamp; 0 in replay and for data ranks other than 0."""
        if not self._links.waits or self._data_rank:
            return 0
        return kept_actions(len(program.actions[self._rank]), steps=program.steps)

    def _is_after_end(self, action: Action) -> bool:
        if action.op is Op.UPDATE:
            return action.version * self._program.update_interval > self.end_step * self._program.microbatches
        return action.microbatch >= self.end_step * self._program.microbatches

    def _forward(self, action: Action) -> Iterator[None]:
        stage, microbatch = action.stage, action.microbatch
        replica = self._stages[stage].weights.replica_of(action.version)
        incoming = received(action, self._program)
        outgoing = sent(action, self._program)
        loads: list[Tensor] = []
        given = (yield from self._receive(incoming[0])) if incoming else self._batches.tokens(microbatch)
        for message in incoming[1:]:
            # Of shards of the embedding: all but one of a token's terms are 0.
            given += yield from self._receive(message)
        targets = None if outgoing else self._batches.targets(microbatch)
        split = (stage, microbatch) in self._split
        passed: Pass
        if stage in self._graphs:
            output, passed = self._graphs[stage].forward(
                replica,
                given,
                targets=targets,
                loss_share=self._loss_share,
                split=split,
                updates=self._updates_between[stage, microbatch],
            )
        else:
            routing = replica.routing()
            output, passed = run_stage(
                replica.module,
                given,
                targets=targets,
                loss_share=self._loss_share,
                split=split,
                documents=self._batches.documents(microbatch),
                routing=routing,
            )
            loads = [load.detach() for load in routing.loads.values()]
        self._links.send_all(outgoing, output)
        if not outgoing:
            self._losses.append(output)
        replica.pending_backwards += 1
        self._saved[stage, microbatch] = _Saved(passed, replica, replica.version, replica.writes, loads)
        self._count_in_flight()

    def _backward(self, action: Action) -> Iterator[None]:
        stage, microbatch = action.stage, action.microbatch
        saved = self._saved.pop((stage, microbatch))
        weights, update = self._stages[stage].weights, self._stages[stage].update
        if weights.replica_of(action.version) is not saved.replica:
            raise RuntimeError(f"{action}: the forward ran on the replica of another version")
        if len(weights.replicas) > 1 and saved.replica.writes != saved.writes:
            # Autograd does not notice where the backward recomputes its activations.
            raise RuntimeError(f"{action}: its weights were written since the forward")
        gradient = yield from self._output_gradient(action)
        mismatch = saved.replica.version - saved.version
        weights.before_backward(last=(microbatch + 1) % self._program.update_interval == 0)
        whole = self._updates.last_backward(action) if saved.passed.reports else None
        with update.at_backward(saved.replica, mismatch=mismatch):
            saved.passed.backward(gradient, whole=whole)
        onward = [message for message in sent(action, self._program) if message.kind is not Kind.SUMS]
        if onward:
            self._links.send_all(onward, saved.passed.input_gradient())
        saved.replica.pending_backwards -= 1
        if not saved.passed.is_split:
            weights.gradient_buffer.count(saved.version, saved.loads)
        else:
            self._halves[stage, microbatch] = _Half(saved.passed, saved.version, saved.loads)
        self._count_in_flight()
        trace = self.trace.stages[stage]
        trace.mismatch_max = max(trace.mismatch_max, mismatch)

    def _backward_weight(self, action: Action) -> None:
        half = self._halves.pop((action.stage, action.microbatch))
        half.passed.weight_half(self._updates.last_backward(action) if half.passed.reports else None)
        self._stages[action.stage].weights.gradient_buffer.count(half.version, half.loads)
        self._count_in_flight()

    def _output_gradient(self, action: Action) -> Generator[None, None, Tensor | None]:
        """The gradient of a stage's output; None: that is the loss."""
        incoming = received(action, self._program)
        tensors = []
        for message in incoming:
            tensors.append((yield from self._receive(message)))
        if action.stage < self._loss_stage:
            return tensors[0]
        if not tensors:
            return None
        merged = merge_parts(tensors, scale=1 / self._loss_share)
        self._losses.append(merged.loss)
        to_shards = [message for message in sent(action, self._program) if message.kind is Kind.SUMS]
        self._links.send_all(to_shards, merged.sums)
        return merged.gradient

    def _head(self, action: Action) -> Iterator[None]:
        stage, microbatch = action.stage, action.microbatch
        replica = self._stages[stage].weights.replica_of(action.version)
        [incoming], [outgoing] = received(action, self._program), sent(action, self._program)
        hidden = yield from self._receive(incoming)
        shard = replica.module.head
        assert isinstance(shard, HeadShard)
        part, kept = shard.run(hidden, self._batches.targets(microbatch))
        assert kept is not None
        self._links.send(outgoing, part)
        self._heads[stage, microbatch] = _Head(shard, kept, replica.version)
        self._count_in_flight()

    def _head_weight(self, action: Action) -> Iterator[None]:
        stage = action.stage
        [incoming] = received(action, self._program)
        sums = yield from self._receive(incoming)
        head = self._heads.pop((stage, action.microbatch))
        factors, hidden = head.shard.gradient_factors(head.kept, sums, scale=1 / self._loss_share)
        gradients = DeferredGradients()
        add_matrix(gradients, head.shard.weight, given=hidden, gradient=factors)
        weights = self._stages[stage].weights
        # A tied shard's update comes after the first T of the next step.
        ahead = action.microbatch // self._program.update_interval - self._step[stage]
        with weights.adding_ahead() if ahead else nullcontext():
            gradients.compute(self._updates.last_backward(action))
            weights.gradient_buffer.count(head.version, ())
        self._count_in_flight()

    def _embed(self, action: Action) -> None:
        [outgoing] = sent(action, self._program)
        shard = self._stages[action.stage].weights.replica_of(action.version).module.head
        assert isinstance(shard, HeadShard)
        self._links.send(outgoing, shard.embed(self._batches.tokens(action.microbatch)))

    def _embed_weight(self, action: Action) -> Iterator[None]:
        [incoming] = received(action, self._program)
        gradient = yield from self._receive(incoming)
        shard = self._stages[action.stage].weights.replica_of(action.version).module.head
        assert isinstance(shard, HeadShard)
        gradients = DeferredGradients()
        shard.leave_embedded(gradients, self._batches.tokens(action.microbatch), gradient)
        gradients.compute(self._updates.last_backward(action))

    def _count_in_flight(self) -> None:
        counts = []
        begun = [stage for stage, _ in (*self._halves, *self._heads)]
        for stage in sorted(self._stages):
            wholes = sum(replica.pending_backwards for replica in self._stages[stage].weights.replicas)
            counts.append((wholes, begun.count(stage)))
        self.in_flight.add(tuple(counts))

    def _begin_update(self, action: Action) -> None:
        stage = action.stage
        gradient = self._stages[stage].take_gradient()
        self._step[stage] = action.version
        # Counted from the versions that forwards have read, not from the program.
        self.trace.stages[stage].note_delays([action.version - 1 - read for read in gradient.versions])
        losses: list[Tensor] = []
        if stage == self._loss_stage:
            losses, self._losses = self._losses, []
        if stage == max(self._stages):
            self._clock.tell(self.trace.note_update)
        self._updates.add(action, gradient, losses)

    def _receive(self, message: Message) -> Generator[None, None, Tensor]:
        while not self._links.waits and not self._links.arrived(message):
            yield
        started = self._clock.mark()
        tensor = self._links.receive(message)
        self._clock.measure(started, self.trace.note_wait, waiting=self._links.waited_for)
        return tensor


def drive(parts: Sequence[Iterator[None] | Generator[None, None, Any]]) -> list[Any]:
    """Advance the parts in turn until all have ended; returns their results. In a replay they are all ranks
    of the run."""
    results: list[Any] = [None] * len(parts)
    going = dict(enumerate(parts))
    while going:
        for index, part in list(going.items()):
            try:
                next(part)
            except StopIteration as stop:
                results[index] = stop.value
                del going[index]
    return results
