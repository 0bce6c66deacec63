"""Programs whose head is in shards, one on every rank (vocabulary parallelism, arXiv 2411.05288).

All ranks compute the head of a micro-batch between the forward and the backward of the last stage: each the
logits of its part of the vocabulary and its part of the gradient of the head's input (S), and later the
gradient of its weights (T). So that no rank waits meanwhile, every stage runs one forward further ahead of
its backwards than without shards.

The forwards and backwards of a rank keep their order. S and T are put between them where they come when ranks
perform S as soon as it can start, and T when there is nothing else to do or two of them wait.

Where embedding and head share a matrix, a shard is one of the embedding, too: it embeds the tokens in its
rows (E), `EMBEDDED_AHEAD` micro-batches before stage 0 needs them, and adds their gradient (G) when it would
do T. A micro-batch's T comes up to a pipeline's length before its G, and an update applies both. So where
nothing flushes, T of the next step begin before an update; those of the step after it wait for the update.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from schedules.actions import NO_MICROBATCH, Action, Op, Program, ScheduleError

FURTHER_AHEAD = 1
"""Forwards that stages run further ahead of their backwards than with the whole head in the last stage."""
EMBEDDED_AHEAD = 2
"""Micro-batches that shards of the embedding are ahead of the first stage's forwards, at most."""
_TIMES = {Op.FORWARD: 20, Op.BACKWARD: 40, Op.BACKWARD_INPUT: 20, Op.BACKWARD_WEIGHT: 20}
"""Times of a rank's share of the blocks, for the order alone. Whole numbers: rounding would decide which of
two actions comes first, and the order change within a segment."""
_HEAD = 20
"""Time of the forward of the whole head, in the unit of `_TIMES`."""
_LATENCY = 1
"""Time of a message, in the unit of `_TIMES`."""
_NEVER = 1 << 62
_FIRST, _NEXT, _LAST = 0, 1, 2
"""Which of the actions that can start at the same time comes first."""


def with_head_shards(program: Program, *, tied: bool = False) -> Program:
    """`program` with the head in shards; its other stages have the same micro-batches and versions.

    Args:
        program: Valid, without shards. All stages update together.
        tied: Whether the shards are those of the embedding, too.

    Raises:
        ScheduleError: Stages update on their own, or a version is not there for one more forward ahead.
    """
    if not program.updates_together:
        raise ScheduleError(
            f"{program.schedule}: stages update on their own, and shards of the head need stages that update "
            "together"
        )
    last = program.stage_actions(program.loss_stage)
    if [action.microbatch for action in last if action.op is Op.FORWARD] != [
        action.microbatch for action in last if action.op is Op.BACKWARD or action.op is Op.BACKWARD_INPUT
    ]:
        raise ScheduleError(
            f"{program.schedule}: shards of the head need backwards of the last stage in the order of its "
            "forwards"
        )
    ranks = range(program.num_ranks)
    by_step = [_by_step(actions, program) for actions in program.actions]
    # Whether each step ends before the next begins.
    flushed = all(
        actions == tuple(chain.from_iterable(steps))
        for actions, steps in zip(program.actions, by_step, strict=True)
    )
    if flushed and all(
        _later(steps[0], later, program) == step for steps in by_step for later, step in enumerate(steps)
    ):
        first = _Order(program, [further_ahead(steps[0]) for steps in by_step], tied=tied).run()
        orders = [
            [action for later in range(program.steps) for action in _later(first[rank], later, program)]
            for rank in ranks
        ]
    elif flushed:
        orders = _Order(
            program,
            [[action for step in steps for action in further_ahead(step)] for steps in by_step],
            tied=tied,
        ).run()
    else:
        orders = _Order(program, [further_ahead(actions) for actions in program.actions], tied=tied).run()
    return replace(
        program,
        rank_of_stage=(*program.rank_of_stage, *ranks),
        head_shards=program.num_ranks,
        tied_shards=tied,
        actions=tuple(map(tuple, orders)),
    )


def _by_step(actions: Sequence[Action], program: Program) -> list[list[Action]]:
    steps: list[list[Action]] = [[] for _ in range(program.steps)]
    update, microbatches, first = Op.UPDATE, program.microbatches, program.first_step
    for action in actions:
        _, op, microbatch, version = action
        steps[(version - 1 if op is update else microbatch // microbatches) - first].append(action)
    return steps


def _later(actions: Sequence[Action], steps: int, program: Program) -> list[Action]:
    """These actions, shifted by a number of steps."""
    later, update = steps * program.microbatches, Op.UPDATE
    return [
        Action(stage, op, NO_MICROBATCH if op is update else microbatch + later, version + steps)
        for stage, op, microbatch, version in actions
    ]


def further_ahead(actions: Sequence[Action]) -> list[Action]:
    """A rank's actions with every forward `FURTHER_AHEAD` forwards of its stage earlier."""
    forwards: dict[int, deque[Action]] = {}
    for action in actions:
        if action.op is Op.FORWARD:
            forwards.setdefault(action.stage, deque()).append(action)
    begun: set[int] = set()
    order = []
    for action in actions:
        if action.op is not Op.FORWARD:
            order.append(action)
            continue
        left = forwards[action.stage]
        if action.stage not in begun:
            begun.add(action.stage)
            order += [left.popleft() for _ in range(min(FURTHER_AHEAD, len(left)))]
        if left:
            order.append(left.popleft())
    return order


@dataclass(slots=True)
class _Rank:
    """What a rank has done, and has to do."""

    number: int
    actions: Sequence[Action]
    """Its forwards, backwards and updates, in order."""
    lookups: deque[Action]
    """E to come, of all that stage 0 forwards."""
    position: int = 0
    """Place in `actions` of its next forward, backward or update."""
    clock: int = 0
    order: list[Action] = field(default_factory=list)
    """All that it has done."""
    heads: deque[tuple[int, int]] = field(default_factory=deque)
    """S to come, in order: when each can start, and its micro-batch."""
    weights: deque[int] = field(default_factory=deque)
    """T to come, in order."""
    sums_at: dict[int, int] = field(default_factory=dict)
    """When they can start, by micro-batch."""
    spreads: deque[tuple[int, int]] = field(default_factory=deque)
    """G to come, as `heads`."""
    gathered: dict[int, int] = field(default_factory=dict)
    """T, and G, performed so far, by step."""
    stamp: int = 0
    """Number of its newest entry in the heap: older ones do not count."""
    next: Op = Op.FORWARD
    """The op of its next action."""
    start: int = _NEVER
    """When that starts, unless another one can start by then."""


class _Order:
    """Runs a segment, or its first step, under fixed times, and lists what each rank does.

    Args:
        program: Without shards.
        actions: By rank, in order: its forwards, backwards and updates.
        tied: As in `with_head_shards`.
    """

    def __init__(self, program: Program, actions: Sequence[Sequence[Action]], *, tied: bool = False) -> None:
        ranks, stages = program.num_ranks, program.num_stages
        self.program = program
        self.microbatches, self.last = program.microbatches, program.loss_stage
        # In units of which a share of a rank's blocks, and of the head, takes a whole number.
        self.times = {op: time * ranks * ranks for op, time in _TIMES.items()}
        self.head, self.head_weight = 2 * _HEAD * stages, _HEAD * stages
        self.latency = _LATENCY * ranks * stages
        # When what an action needs arrives, by stage and micro-batch.
        self.activations_at: list[dict[int, int]] = [{} for _ in range(stages)]
        self.gradient_at: list[dict[int, int]] = [{} for _ in range(stages)]
        self.parts: dict[int, list[int]] = {}
        forwards = [action for action in actions[program.rank_of_stage[0]] if action[:2] == (0, Op.FORWARD)]
        self.ranks = [
            _Rank(number, own, lookups=deque(forwards if tied else ())) for number, own in enumerate(actions)
        ]
        self.holders = [self.ranks[rank] for rank in program.rank_of_stage]
        """The rank of each stage."""
        self.tied, self.all_lookups, self.forwarded = tied, len(forwards), 0
        self.embedded: dict[int, list[int]] = {}
        self.read: dict[int, int] = {}
        """Version that the forward of the last stage has read, by micro-batch."""
        self.written = [program.initial_versions[-1]] * (stages + ranks)
        self.complete = self.written[0]
        """The newest version that all stages have written."""
        self.heap: list[tuple[int, int, int]] = []

    def run(self) -> list[list[Action]]:
        """By rank, its actions in order."""
        perform = {
            Op.HEAD: self._perform_head,
            Op.HEAD_WEIGHT: self._perform_head_weight,
            Op.EMBED: self._perform_embed,
            Op.EMBED_WEIGHT: self._perform_embed_weight,
        }
        self._look_at_all()
        while self.heap:
            start, number, stamp = heapq.heappop(self.heap)
            rank = self.ranks[number]
            if stamp == rank.stamp:
                perform.get(rank.next, self._perform_next)(rank, start)
                self._look_at(rank)
        for rank in self.ranks:
            actions, left = rank.actions, (rank.heads, rank.weights, rank.spreads, rank.lookups)
            if rank.position < len(actions) or any(left):
                raise ScheduleError(
                    f"{self.program.schedule}: shards of the head need one more micro-batch in flight, and "
                    f"{actions[min(rank.position, len(actions) - 1)]} cannot be performed then"
                )
        return [rank.order for rank in self.ranks]

    def _look_at(self, rank: _Rank) -> None:
        """Put the rank's next action into the heap, in place of what it was to do next: the first that can
        start; of several, the most urgent, of these E before G, S and T."""
        rank.stamp += 1
        now, complete, tied = rank.clock, self.complete, self.tied
        start, urgency, updates_next = _NEVER, _LAST, False
        position, actions = rank.position, rank.actions
        if position < len(actions):
            stage, op, microbatch, version = actions[position]
            # When everything that it needs is there; None: that is not known yet.
            at: int | None = 0
            if op is Op.UPDATE:
                updates_next = True
                version -= 1
            elif op is Op.FORWARD:
                if stage or tied:
                    at = self.activations_at[stage].get(microbatch)
            elif op is not Op.BACKWARD_WEIGHT:
                at = self.gradient_at[stage].get(microbatch)
            if at is not None and version <= complete:
                start, urgency, rank.next = now if now > at else at, _NEXT, op
        if tied:
            if lookups := rank.lookups:
                place = self.all_lookups - len(lookups)
                may_look_up = place < self.forwarded + EMBEDDED_AHEAD and lookups[0].version <= complete
                if may_look_up and now <= start:
                    start, urgency, rank.next = now, _FIRST, Op.EMBED
            if spreads := rank.spreads:
                at, microbatch = spreads[0]
                at = now if now > at else at
                completes = self._completes(rank, microbatch)
                urgent = len(spreads) > 1 or completes or updates_next
                written = complete if completes else self._written_by(rank)
                if microbatch // self.microbatches <= written and (
                    at < start or (at == start and urgent and urgency > _FIRST)
                ):
                    start, urgency, rank.next = at, _FIRST if urgent else _LAST, Op.EMBED_WEIGHT
        if heads := rank.heads:
            at, microbatch = heads[0]
            at = now if now > at else at
            if (at < start or (at == start and urgency > _FIRST)) and self.read[microbatch] <= complete:
                start, urgency, rank.next = at, _FIRST, Op.HEAD
        if weights := rank.weights:
            microbatch = weights[0]
            at = rank.sums_at.get(microbatch)
            if at is not None:
                at = now if now > at else at
                completes = self._completes(rank, microbatch)
                if completes:
                    can_add = microbatch // self.microbatches <= complete
                else:
                    can_add = not tied or microbatch // self.microbatches <= self._written_by(rank) + 1
                # What completes a tied gradient is late: the next look-ups wait for the update.
                urgent = len(weights) > 1 or updates_next or (tied and completes)
                if can_add and (at < start or (at == start and urgent and urgency > _FIRST)):
                    start, rank.next = at, Op.HEAD_WEIGHT
        rank.start = start
        if start < _NEVER:
            heapq.heappush(self.heap, (start, rank.number, rank.stamp))

    def _look_at_all(self) -> None:
        for rank in self.ranks:
            self._look_at(rank)

    def _look_at_holder(self, stage: int, op: Op, microbatch: int, arrival: int) -> None:
        """Look at the rank of `stage` again, if what it needed for this action, and has at `arrival`, is what
        it waited for."""
        rank = self.holders[stage]
        position, actions = rank.position, rank.actions
        if arrival <= rank.start and position < len(actions):
            next_stage, next_op, next_microbatch, _ = actions[position]
            if (
                next_stage == stage
                and next_microbatch == microbatch
                and (next_op is Op.FORWARD) == (op is Op.FORWARD)
            ):
                self._look_at(rank)

    def _perform_head(self, rank: _Rank, start: int) -> None:
        _, microbatch = rank.heads.popleft()
        self._add(rank, Op.HEAD, microbatch)
        rank.weights.append(microbatch)
        rank.clock = start + self.head
        last = self.last
        parts = self.parts.setdefault(microbatch, [])
        parts.append(self._arrival(rank, self.holders[last]))
        if len(parts) == len(self.ranks):
            arrival = self.gradient_at[last][microbatch] = max(self.parts.pop(microbatch))
            self._look_at_holder(last, Op.BACKWARD, microbatch, arrival)

    def _perform_head_weight(self, rank: _Rank, start: int) -> None:
        microbatch = rank.weights.popleft()
        self._add(rank, Op.HEAD_WEIGHT, microbatch)
        rank.clock = start + self.head_weight
        self._gather(rank, microbatch)

    def _perform_embed(self, rank: _Rank, start: int) -> None:
        _, _, microbatch, version = rank.lookups.popleft()
        rank.order.append(Action(self.last + 1 + rank.number, Op.EMBED, microbatch, version))
        rank.clock = start
        arrivals = self.embedded.setdefault(microbatch, [])
        arrivals.append(self._arrival(rank, self.holders[0]))
        if len(arrivals) == len(self.ranks):
            arrival = self.activations_at[0][microbatch] = max(self.embedded.pop(microbatch))
            self._look_at_holder(0, Op.FORWARD, microbatch, arrival)

    def _perform_embed_weight(self, rank: _Rank, start: int) -> None:
        rank.clock = start
        _, microbatch = rank.spreads.popleft()
        self._add(rank, Op.EMBED_WEIGHT, microbatch)
        self._gather(rank, microbatch)

    def _written_by(self, rank: _Rank) -> int:
        """Version that the shard has written last: the number of the step that its gradient is of."""
        return self.written[self.last + 1 + rank.number]

    def _completes(self, rank: _Rank, microbatch: int) -> bool:
        """Whether the next T or G of the rank's shard, that of `microbatch`, completes a step's gradient."""
        gathered = rank.gathered.get(microbatch // self.microbatches, 0)
        return gathered + 1 == self.microbatches * (1 + self.tied)

    def _gather(self, rank: _Rank, microbatch: int) -> None:
        """Count a T or G; the update follows the last of a step."""
        step = microbatch // self.microbatches
        completes = self._completes(rank, microbatch)
        rank.gathered[step] = rank.gathered.get(step, 0) + 1
        if completes:
            stage = self.last + 1 + rank.number
            rank.order.append(Action(stage, Op.UPDATE, NO_MICROBATCH, step + 1))
            self._write(stage, step + 1)

    def _perform_next(self, rank: _Rank, start: int) -> None:
        action = rank.actions[rank.position]
        stage, op, microbatch, version = action
        rank.position += 1
        rank.order.append(action)
        if op is Op.UPDATE:
            self._write(stage, version)
            return
        rank.clock = start + self.times[op]
        if op is Op.FORWARD:
            if self.tied and not stage:
                allowed = self.forwarded + EMBEDDED_AHEAD
                self.forwarded += 1
                for other in self.ranks:
                    if self.all_lookups - len(other.lookups) == allowed:
                        self._look_at(other)
            if stage < self.last:
                arrival = self._arrival(rank, self.holders[stage + 1])
                self.activations_at[stage + 1][microbatch] = arrival
                self._look_at_holder(stage + 1, op, microbatch, arrival)
                return
            self.read[microbatch] = version
            for other, arrival in self._arrivals(rank):
                other.heads.append((arrival, microbatch))
                if len(other.heads) == 1 and arrival <= other.start:
                    self._look_at(other)
        elif op is not Op.BACKWARD_WEIGHT:
            if stage:
                arrival = self._arrival(rank, self.holders[stage - 1])
                self.gradient_at[stage - 1][microbatch] = arrival
                self._look_at_holder(stage - 1, op, microbatch, arrival)
            elif self.tied:
                for other, arrival in self._arrivals(rank):
                    other.spreads.append((arrival, microbatch))
                    if len(other.spreads) <= 2:
                        self._look_at(other)
            if stage == self.last:
                for other, arrival in self._arrivals(rank):
                    other.sums_at[microbatch] = arrival
                    if arrival <= other.start and other.weights and other.weights[0] == microbatch:
                        self._look_at(other)

    def _add(self, rank: _Rank, op: Op, microbatch: int) -> None:
        rank.order.append(Action(self.last + 1 + rank.number, op, microbatch, self.read[microbatch]))

    def _arrivals(self, sender: _Rank) -> list[tuple[_Rank, int]]:
        """All ranks, and when a message to them arrives."""
        own, others = sender.clock, sender.clock + self.latency
        return [(rank, own if rank is sender else others) for rank in self.ranks]

    def _arrival(self, sender: _Rank, receiver: _Rank) -> int:
        return sender.clock + (self.latency if sender is not receiver else 0)

    def _write(self, stage: int, version: int) -> None:
        self.written[stage] = version
        if min(self.written) > self.complete:
            self.complete = min(self.written)
            self._look_at_all()
