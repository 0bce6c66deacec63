"""A program as a list of steps, each of which follows from earlier ones: when they end, under any costs, in
one pass.

Ranks perform their lists in order, and what an action waits for does not depend on times, unless messages
share links. So one list serves all costs that have the same reductions, and a planner asks for a program
under many. The rules are those of `simulate`, which plays a program for one cost model and says when all
begins, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from schedules.actions import Op, Program
from schedules.costs import Costs
from schedules.messages import Channel, Kind, channel_ends, is_local

Step = tuple[int, tuple[tuple[int, int], ...], int]
"""An action: how many steps back the one before it on its rank is; the same of others that it waits for, each
with the number of a delay after it; and the number of the time that it takes. Before the first step is the
start, at time 0."""


class Flow(NamedTuple):
    """The steps of a program, and by rank those that end a step of the run, and a later one."""

    steps: tuple[Step, ...]
    apart: int
    """How many steps of the run the later one is after the other."""
    from_ends: tuple[int, ...]
    to_ends: tuple[int, ...]


def flow_between(program: Program, first: int, last: int, *, reduced: Sequence[bool]) -> Flow:
    """The flow of a valid program.

    Args:
        program: to be performed.
        first: a step, numbered within it.
        last: a later one, at whose end the flow ends.
        reduced: for each stage, whether its update has to wait for a reduction.
    """
    flowing = _Flowing(program, [program.updates_together or is_reduced for is_reduced in reduced])
    while sum(flowing.advance(rank) for rank in range(program.num_ranks)):
        pass
    from_ends, to_ends = (
        tuple(
            numbers[marks[step]]
            for numbers, marks in zip(flowing.numbers, program.ends_of_steps, strict=True)
        )
        for step in (first, last)
    )
    return Flow(tuple(flowing.steps[: max(to_ends)]), last - first, from_ends, to_ends)


def seconds_between_ends(flow: Flow, costs: Costs) -> float:
    """Time from the end of the first of the flow's two steps to that of the second, as a mean over the ranks.

    Args:
        flow: of a program.
        costs: whose reductions are 0 where it has none; `norm`, `transfer` and `jitter` are 0.
    """
    stages = len(costs.forward)
    none = (0.0,) * stages
    times = [time for of_op in _TIMES for time in getattr(costs, of_op) or none]
    delays = (0.0, costs.latency, costs.hidden_latency, costs.part_latency, *costs.reduction)
    ends = [0.0]
    for before, waits, takes in flow.steps:
        now = ends[-before]
        for other, delay in waits:
            known = ends[-other] + delays[delay]
            if known > now:
                now = known
        ends.append(now + times[takes])
    total = 0.0
    for begin, end in zip(flow.from_ends, flow.to_ends, strict=True):
        total += ends[end] - ends[begin]
    return total / flow.apart / len(flow.to_ends)


_TIMES = {
    "forward": Op.FORWARD,
    "backward": Op.BACKWARD,
    "input_half": Op.BACKWARD_INPUT,
    "weight_half": Op.BACKWARD_WEIGHT,
    "head": Op.HEAD,
    "head_weight": Op.HEAD_WEIGHT,
    "embed": Op.EMBED,
    "embed_weight": Op.EMBED_WEIGHT,
    "update": Op.UPDATE,
}
"""Fields of `Costs`, and what they are the times of. Times are numbered by field, and within it by stage."""
_WITHIN_A_RANK, _OF_REDUCTIONS = 0, 4
"""Numbers of delays. Those of messages between ranks are 1 to 3, and those of reductions are by stage."""
_DELAYS = {Kind.HIDDEN: 2, Kind.PART: 3}


class _Flowing:
    """How far each rank has come."""

    def __init__(self, program: Program, deferred: Sequence[bool]) -> None:
        self.program, self.deferred = program, deferred
        self.steps: list[Step] = []
        self.numbers: list[list[int]] = [[] for _ in program.actions]
        """By rank, the steps of its actions; 0 of updates that are deferred."""
        self.latest = [0] * program.num_ranks
        self.first_time = {op: number * program.num_stages for number, op in enumerate(_TIMES.values())}
        # By micro-batch, the step that sends it.
        sent: dict[Channel, dict[int, int]] = defaultdict(dict)
        self.ends = {
            key: (
                [(sent[channel], self._delay(channel)) for channel in ends.receives],
                [sent[channel] for channel in ends.sends],
            )
            for key, ends in channel_ends(program).items()
        }
        self.pending: dict[int, int] = {}
        """By stage, the version that its deferred update will write."""
        self.begun: dict[int, dict[int, int]] = defaultdict(dict)
        """By version and stage, the step behind which the update is deferred."""

    def _delay(self, channel: Channel) -> int:
        return _WITHIN_A_RANK if is_local(channel, self.program) else _DELAYS.get(channel.kind, 1)

    def advance(self, rank: int) -> bool:
        """Take a rank as far as it can go; returns whether it went on."""
        numbers = self.numbers[rank]
        begun, actions = len(numbers), self.program.actions[rank]
        for place in range(begun, len(actions)):
            stage, op, microbatch, version = actions[place]
            if version >= self.pending.get(stage, version + 1) and not self._update(rank, stage):
                break
            if op is Op.UPDATE:
                number = 0
                if self.deferred[stage]:
                    self.pending[stage], self.begun[version][stage] = version, self.latest[rank]
                else:
                    number = self._step(rank, [], op, stage)
            else:
                receives, sends = self.ends[stage, op]
                waits = []
                for sent, delay in receives:
                    if microbatch not in sent:
                        return len(numbers) > begun
                    waits.append((sent[microbatch], delay))
                number = self._step(rank, waits, op, stage)
                for sent in sends:
                    sent[microbatch] = number
            numbers.append(number)
        return len(numbers) > begun

    def _update(self, rank: int, stage: int) -> bool:
        """Perform a deferred update, and those of the rank's other stages that are one with it; returns
        whether all that it waits for is known."""
        version, waiting_for, unit = self.pending[stage], [stage], [stage]
        begun = self.begun[version]
        if self.program.updates_together:
            waiting_for = list(range(self.program.num_stages))
            if len(begun) < len(waiting_for):
                return False
            rank_of_stage = self.program.rank_of_stage
            unit = [other for other in waiting_for if rank_of_stage[other] == rank and other in self.pending]
            unit = [other for other in unit if self.pending[other] == version]
        for each in unit:
            waits = [(begun[other], _OF_REDUCTIONS + other) for other in waiting_for]
            self._step(rank, waits, Op.UPDATE, each)
            del self.pending[each]
            waiting_for = []
        return True

    def _step(self, rank: int, waits: list[tuple[int, int]], op: Op, stage: int) -> int:
        """Add a step behind others, which are numbered from 1; returns its number."""
        number = len(self.steps) + 1
        back = tuple([(number - other, delay) for other, delay in waits])
        self.steps.append((number - self.latest[rank], back, self.first_time[op] + stage))
        self.latest[rank] = number
        return number
