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
from dataclasses import replace
from itertools import pairwise

from schedules.actions import NO_MICROBATCH, Action, Op, Program
from schedules.errors import ScheduleError

FURTHER_AHEAD = 1
"""Forwards that stages run further ahead of their backwards than with the whole head in the last stage."""
EMBEDDED_AHEAD = 2
"""Micro-batches that shards of the embedding are ahead of the first stage's forwards, at most."""
_TIMES = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
"""Of a rank's share of the blocks, for the order alone."""
_HEAD = 1.0
"""Likewise, of the forward of the whole head."""
_LATENCY = 0.05
"""Likewise, of a message."""
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
    flushed = all(_in_order(actions, program) for actions in program.actions)
    if flushed and all(_alike(steps) for steps in by_step):
        first = _Order(program, [_further_ahead(steps[0]) for steps in by_step], tied=tied).run()
        actions = [[_later(first[rank], steps, program) for steps in range(program.steps)] for rank in ranks]
        orders = [[action for step in steps for action in step] for steps in actions]
    elif flushed:
        orders = _Order(
            program,
            [[action for step in steps for action in _further_ahead(step)] for steps in by_step],
            tied=tied,
        ).run()
    else:
        orders = _Order(program, [_further_ahead(actions) for actions in program.actions], tied=tied).run()
    return replace(
        program,
        rank_of_stage=(*program.rank_of_stage, *ranks),
        head_shards=program.num_ranks,
        tied_shards=tied,
        actions=tuple(map(tuple, orders)),
    )


def _step(action: Action, program: Program) -> int:
    """The step of an action, counted from the segment's first."""
    step = action.version - 1 if action.op is Op.UPDATE else action.microbatch // program.microbatches
    return step - program.first_step


def _in_order(actions: Sequence[Action], program: Program) -> bool:
    """Whether each step ends before the next begins."""
    return all(_step(one, program) <= _step(other, program) for one, other in pairwise(actions))


def _by_step(actions: Sequence[Action], program: Program) -> list[list[Action]]:
    steps: list[list[Action]] = [[] for _ in range(program.steps)]
    for action in actions:
        steps[_step(action, program)].append(action)
    return steps


def _later(actions: Sequence[Action], steps: int, program: Program) -> list[Action]:
    """The same some steps later."""
    later = steps * program.microbatches
    return [
        Action(stage, op, NO_MICROBATCH if op is Op.UPDATE else microbatch + later, version + steps)
        for stage, op, microbatch, version in actions
    ]


def _alike(steps: Sequence[Sequence[Action]]) -> bool:
    """Whether all steps perform the same with the same distance of their versions."""
    shapes = set()
    for actions in steps:
        first = min(action.microbatch for action in actions if action.op is not Op.UPDATE)
        update = next(action.version for action in actions if action.op is Op.UPDATE)
        shapes.add(
            tuple(
                (stage, op, 0 if op is Op.UPDATE else microbatch - first, version - update)
                for stage, op, microbatch, version in actions
            )
        )
    return len(shapes) == 1


def _further_ahead(actions: Sequence[Action]) -> list[Action]:
    """`actions` of a rank with every forward `FURTHER_AHEAD` forwards of its stage earlier."""
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
        count = 1 if action.stage in begun else 1 + FURTHER_AHEAD
        begun.add(action.stage)
        order += [left.popleft() for _ in range(min(count, len(left)))]
    return order


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
        self.actions = actions
        share = ranks / stages
        self.times = {op: time * share for op, time in _TIMES.items()}
        self.head, self.head_weight = 2 * _HEAD / ranks, _HEAD / ranks
        self.position = [0] * ranks
        self.clock = [0.0] * ranks
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        # When what an action needs arrives, by stage and micro-batch.
        self.activations_at: list[dict[int, float]] = [{} for _ in range(stages)]
        self.gradient_at: list[dict[int, float]] = [{} for _ in range(stages)]
        self.parts: dict[int, list[float]] = {}
        # By rank: S and T to come, in order, and when they can start.
        self.heads: list[deque[tuple[float, int]]] = [deque() for _ in range(ranks)]
        self.weights: list[deque[int]] = [deque() for _ in range(ranks)]
        self.sums_at: list[dict[int, float]] = [{} for _ in range(ranks)]
        # By rank: G to come, in order, and when they can start; E to come, of all that stage 0 forwards.
        self.spreads: list[deque[tuple[float, int]]] = [deque() for _ in range(ranks)]
        forwards = [action for action in actions[program.rank_of_stage[0]] if action[:2] == (0, Op.FORWARD)]
        self.lookups: list[deque[Action]] = [deque(forwards if tied else ()) for _ in range(ranks)]
        self.tied, self.all_lookups, self.forwarded = tied, len(forwards), 0
        self.embedded: dict[int, list[float]] = {}
        self.gathered: list[dict[int, int]] = [{} for _ in range(ranks)]
        """By rank and step: T, and G, performed so far."""
        self.read: dict[int, int] = {}
        """Version that the forward of the last stage has read, by micro-batch."""
        self.written = [program.initial_versions[-1]] * (stages + ranks)
        self.complete = self.written[0]
        """The newest version that all stages have written."""
        self.heap: list[tuple[float, int, int]] = []
        self.stamps = [0] * ranks
        self.next: list[tuple[float, int, Op]] = [(0.0, _NEXT, Op.FORWARD)] * ranks
        """What each rank does next: when, how urgent, and the op."""

    def run(self) -> list[list[Action]]:
        """By rank, its actions in order."""
        for rank in range(self.program.num_ranks):
            self._look_at(rank)
        while self.heap:
            _, rank, stamp = heapq.heappop(self.heap)
            if stamp == self.stamps[rank]:
                self._perform(rank)
        for rank, actions in enumerate(self.actions):
            left = (self.heads[rank], self.weights[rank], self.spreads[rank], self.lookups[rank])
            if self.position[rank] < len(actions) or any(left):
                raise ScheduleError(
                    f"{self.program.schedule}: shards of the head need one more micro-batch in flight, and "
                    f"{actions[min(self.position[rank], len(actions) - 1)]} cannot be performed then"
                )
        return self.orders

    def _choices(self, rank: int) -> list[tuple[float, int, Op]]:
        """When the rank can start what, and how urgent that is; of its list, the op is that of the next."""
        now, choices = self.clock[rank], []
        position, actions = self.position[rank], self.actions[rank]
        action = actions[position] if position < len(actions) else None
        if action is not None:
            at = self._can_start(action)
            if at is not None:
                choices.append((max(now, at), _NEXT, action.op))
        if self.heads[rank]:
            at, microbatch = self.heads[rank][0]
            if self.read[microbatch] <= self.complete:
                choices.append((max(now, at), _FIRST, Op.HEAD))
        if self.lookups[rank]:
            place = self.all_lookups - len(self.lookups[rank])
            if place < self.forwarded + EMBEDDED_AHEAD and self.lookups[rank][0].version <= self.complete:
                choices.append((now, _FIRST, Op.EMBED))
        if self.spreads[rank]:
            at, microbatch = self.spreads[rank][0]
            step = microbatch // self.program.microbatches
            completes = self._completes(rank, microbatch)
            if step <= (self.complete if completes else self._written_by(rank)):
                urgent = (
                    len(self.spreads[rank]) > 1
                    or completes
                    or (action is not None and action.op is Op.UPDATE)
                )
                choices.append((max(now, at), _FIRST if urgent else _LAST, Op.EMBED_WEIGHT))
        if self.weights[rank]:
            microbatch = self.weights[rank][0]
            at = self.sums_at[rank].get(microbatch)
            step = microbatch // self.program.microbatches
            completes = self._completes(rank, microbatch)
            if completes:
                can_add = step <= self.complete
            else:
                can_add = not self.tied or step <= self._written_by(rank) + 1
            if at is not None and can_add:
                urgent = len(self.weights[rank]) > 1 or (action is not None and action.op is Op.UPDATE)
                # What completes a tied gradient is late: the next look-ups wait for the update.
                urgent |= self.tied and completes
                choices.append((max(now, at), _FIRST if urgent else _LAST, Op.HEAD_WEIGHT))
        return choices

    def _can_start(self, action: Action) -> float | None:
        """When everything that `action` needs is there; None: that is not known yet."""
        stage, op, microbatch, version = action
        if version - (op is Op.UPDATE) > self.complete:
            return None
        if op is Op.FORWARD:
            return self.activations_at[stage].get(microbatch) if stage or self.tied else 0.0
        if op is Op.UPDATE or op is Op.BACKWARD_WEIGHT:
            return 0.0
        return self.gradient_at[stage].get(microbatch)

    def _look_at(self, rank: int) -> None:
        """Put the rank's next action into the heap, in place of what it was to do next."""
        self.stamps[rank] += 1
        if choices := self._choices(rank):
            self.next[rank] = min(choices)
            heapq.heappush(self.heap, (self.next[rank][0], rank, self.stamps[rank]))

    def _perform(self, rank: int) -> None:
        start, _, op = self.next[rank]
        changed = {rank}
        if op is Op.HEAD:
            changed |= self._perform_head(rank, start)
        elif op is Op.HEAD_WEIGHT:
            changed |= self._perform_head_weight(rank, start)
        elif op is Op.EMBED:
            changed |= self._perform_embed(rank, start)
        elif op is Op.EMBED_WEIGHT:
            self.clock[rank] = start
            _, microbatch = self.spreads[rank].popleft()
            self._add(rank, Op.EMBED_WEIGHT, microbatch)
            changed |= self._gather(rank, microbatch)
        else:
            changed |= self._perform_next(rank, start)
        for other in changed:
            self._look_at(other)

    def _perform_head(self, rank: int, start: float) -> set[int]:
        _, microbatch = self.heads[rank].popleft()
        self._add(rank, Op.HEAD, microbatch)
        self.weights[rank].append(microbatch)
        self.clock[rank] = start + self.head
        last = self.program.loss_stage
        holder = self.program.rank_of_stage[last]
        parts = self.parts.setdefault(microbatch, [])
        parts.append(self._arrival(rank, holder))
        if len(parts) < self.program.num_ranks:
            return set()
        self.gradient_at[last][microbatch] = max(self.parts.pop(microbatch))
        return {holder}

    def _perform_head_weight(self, rank: int, start: float) -> set[int]:
        microbatch = self.weights[rank].popleft()
        self._add(rank, Op.HEAD_WEIGHT, microbatch)
        self.clock[rank] = start + self.head_weight
        return self._gather(rank, microbatch)

    def _perform_embed(self, rank: int, start: float) -> set[int]:
        _, _, microbatch, version = self.lookups[rank].popleft()
        self.orders[rank].append(Action(self.program.num_stages + rank, Op.EMBED, microbatch, version))
        self.clock[rank] = start
        first = self.program.rank_of_stage[0]
        arrivals = self.embedded.setdefault(microbatch, [])
        arrivals.append(self._arrival(rank, first))
        if len(arrivals) < self.program.num_ranks:
            return set()
        self.activations_at[0][microbatch] = max(self.embedded.pop(microbatch))
        return {first}

    def _written_by(self, rank: int) -> int:
        """Version that the shard has written last: the number of the step that its gradient is of."""
        return self.written[self.program.num_stages + rank]

    def _completes(self, rank: int, microbatch: int) -> bool:
        """Whether the next T or G of the rank's shard, that of `microbatch`, completes a step's gradient."""
        parts = self.gathered[rank].get(microbatch // self.program.microbatches, 0) + 1
        return parts == self.program.microbatches * (1 + self.tied)

    def _gather(self, rank: int, microbatch: int) -> set[int]:
        """Count a T or G; the update follows the last of a step."""
        step = microbatch // self.program.microbatches
        completes = self._completes(rank, microbatch)
        self.gathered[rank][step] = self.gathered[rank].get(step, 0) + 1
        if not completes:
            return set()
        stage = self.program.num_stages + rank
        self.orders[rank].append(Action(stage, Op.UPDATE, NO_MICROBATCH, step + 1))
        return self._write(stage, step + 1)

    def _perform_next(self, rank: int, start: float) -> set[int]:
        action = self.actions[rank][self.position[rank]]
        stage, op, microbatch, version = action
        self.position[rank] += 1
        self.orders[rank].append(action)
        if op is Op.UPDATE:
            return self._write(stage, version)
        self.clock[rank] = start + self.times[op]
        rank_of_stage, last = self.program.rank_of_stage, self.program.loss_stage
        changed: set[int] = set()
        if op is Op.FORWARD and stage == 0 and self.tied:
            self.forwarded += 1
            changed.update(range(self.program.num_ranks))
        if op is Op.FORWARD and stage < last:
            changed.add(rank_of_stage[stage + 1])
            self.activations_at[stage + 1][microbatch] = self._arrival(rank, rank_of_stage[stage + 1])
        elif op is Op.FORWARD:
            self.read[microbatch] = version
            for other, heads in enumerate(self.heads):
                heads.append((self._arrival(rank, other), microbatch))
            changed.update(range(self.program.num_ranks))
        elif op is not Op.BACKWARD_WEIGHT:
            if stage == last:
                for other, sums_at in enumerate(self.sums_at):
                    sums_at[microbatch] = self._arrival(rank, other)
                changed.update(range(self.program.num_ranks))
            if not stage and self.tied:
                for other, spreads in enumerate(self.spreads):
                    spreads.append((self._arrival(rank, other), microbatch))
                changed.update(range(self.program.num_ranks))
            if stage:
                changed.add(rank_of_stage[stage - 1])
                self.gradient_at[stage - 1][microbatch] = self._arrival(rank, rank_of_stage[stage - 1])
        return changed

    def _add(self, rank: int, op: Op, microbatch: int) -> None:
        stage = self.program.num_stages + rank
        self.orders[rank].append(Action(stage, op, microbatch, self.read[microbatch]))

    def _arrival(self, sender: int, receiver: int) -> float:
        return self.clock[sender] + (_LATENCY if sender != receiver else 0.0)

    def _write(self, stage: int, version: int) -> set[int]:
        self.written[stage] = version
        before, self.complete = self.complete, min(self.written)
        return set(range(self.program.num_ranks)) if self.complete > before else set()
