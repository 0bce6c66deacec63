"""The time of a step in the steady state: the maximum cycle ratio of a program's periodic event graph.

The middle of a program repeats. What its ranks do in one step are the nodes of a graph. An edge leads to a
node from what it waits for: the action before it on its rank, or one whose message or gradient it needs. The
edge's height is how many steps lie between the two. Around a cycle, times and delays are added up, and so are
heights: the time of a step is the largest quotient of the two. A flush is an edge like any other: the first
forward of a step waits for the update that ends the step before.

The rules are those of `simulate`, which plays a segment from its start: its steps come to take this time, at
once or after hundreds of them. Two things the graph does not have: messages that share busy links, and random
times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedules.actions import Op, Program
from schedules.costs import TIMES, Costs
from schedules.messages import Channel, channel_ends, is_local
from schedules.simulate import microbatches_to_fill

MOST_STEPS_REPEATED = 4
"""Longest period that is looked for, in steps. A schedule of the family repeats every step."""


MOST_ITERATIONS = 10_000
"""Iterations of a search at most; it takes ten or twenty."""


class NotPeriodicError(ValueError):
    """The middle of a program does not repeat: it has too few steps, or its steps differ."""


Edge = tuple[int, int, int]
"""What a node waits for: the number of another node; its height, which is the periods from that node's turn
to the one that waits, negative where a rank runs ahead; and the number of the time between the end of one and
the start of the other (see `StepGraph.delays`). A plain tuple: a program has tens of thousands."""


class StepTime(NamedTuple):
    """A step in the steady state, in the unit of the costs."""

    seconds: float
    busy: tuple[float, ...]
    """For each rank, the share of that time in which it computes."""
    policy: tuple[int, ...]
    """For each node of the graph, the edge that it waits for longest. Under similar costs this is the same
    for most nodes, so a search that begins here ends sooner."""

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank is idle, as a mean over the ranks."""
        return max(0.0, 1.0 - sum(self.busy) / len(self.busy))


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One period of a program's steady state, for any times."""

    steps: int
    """Steps of a period."""
    takes: tuple[tuple[Op, int], ...]
    """For each node, the op and the stage whose time it takes."""
    edges: tuple[tuple[Edge, ...], ...]
    """For each node, what it waits for; the first is the node before it on its rank."""
    delays: tuple[Channel | int | None, ...]
    """What edges have between their nodes: a message of a channel, the reduction of a stage's gradient with
    the norm behind it, or nothing."""
    work: tuple[tuple[tuple[Op, int, int], ...], ...]
    """For each rank, how often it does each op of each of its stages in a period."""
    reduced: tuple[bool, ...]
    """For each stage, whether its update waits for a collective, up to the first reader of its version."""
    norm: bool
    """Whether updates wait for a gradient norm over all stages."""

    def step_time(self, costs: Costs, *, policy: Sequence[int] | None = None) -> StepTime:
        """The time of a step, by Howard's policy iteration.

        Args:
            costs: Times of actions and messages, without jitter and without messages that share links.
            policy: Where to begin: that of the same graph under other costs.

        Raises:
            ValueError: The graph was built for other costs.
        """
        times, delays = self._taking(costs)
        edges = [
            [(before, height, times[op][stage] + delays[delay]) for before, height, delay in waits]
            for (op, stage), waits in zip(self.takes, self.edges, strict=True)
        ]
        ratio, best = _largest_ratio(edges, policy or (0,) * len(edges))
        # Cycles of one ratio are rounded otherwise: the last digits would depend on where the search began.
        ratio = float(f"{ratio:.13g}")
        work = [sum(count * times[op][stage] for op, stage, count in of_rank) for of_rank in self.work]
        return StepTime(
            seconds=ratio / self.steps,
            busy=tuple(seconds / ratio if ratio else 1.0 for seconds in work),
            policy=best,
        )

    def least_seconds(self, costs: Costs, *, policy: Sequence[int]) -> float:
        """A lower bound of the time of a step: the longest cycle of a policy, perhaps that of other costs.

        Raises:
            ValueError: The graph was built for other costs.
        """
        times, delays = self._taking(costs)
        chosen = []
        for (op, stage), waits, which in zip(self.takes, self.edges, policy, strict=True):
            before, height, delay = waits[which]
            chosen.append((before, height, times[op][stage] + delays[delay]))
        return _largest_of_chosen(chosen)[0] / self.steps

    def _taking(self, costs: Costs) -> tuple[dict[Op, Sequence[float]], list[float]]:
        """The times of each op at each stage, and the delays of the graph by their numbers."""
        self._check(costs)
        times = {op: getattr(costs, field) or (0.0,) * len(costs.forward) for field, op in TIMES.items()}
        return times, [self._delay(delay, costs) for delay in self.delays]

    def _check(self, costs: Costs) -> None:
        if costs.transfer or costs.jitter:
            raise ValueError("messages that share links, and random times, have to be simulated")
        if self.norm and costs.norm is None:
            raise ValueError("the graph has updates wait for a norm, and the costs have none")
        if any(time and not waits for time, waits in zip(costs.reduction, self.reduced, strict=True)):
            raise ValueError("the graph has no reduction at a stage whose costs have one")

    def _delay(self, delay: Channel | int | None, costs: Costs) -> float:
        if delay is None:
            return 0.0
        if isinstance(delay, Channel):
            return costs.latency_of(delay)
        return costs.reduction[delay] + (costs.norm or 0.0 if self.norm else 0.0)


def step_time(program: Program, costs: Costs) -> StepTime:
    """The time of a step in the middle of `program`, which must be valid (see `verify`).

    Raises:
        NotPeriodicError: The middle of the program does not repeat.
        ValueError: The costs have to be simulated.
    """
    reduced = [time > 0 for time in costs.reduction]
    return step_graph(program, reduced=reduced, norm=costs.norm is not None).step_time(costs)


def step_graph_of(
    build: Callable[[int], Program],
    *,
    reduced: Sequence[bool] | bool = False,
    norm: bool = True,
    steps: int = 4,
) -> tuple[StepGraph, Program]:
    """The graph of a schedule's steady state, and the program of a segment that has one.

    Args:
        build: Returns the program of a segment of so many steps.
        reduced: As in `step_graph`.
        norm: As in `step_graph`.
        steps: Steps of the first segment to try; longer ones follow.

    Raises:
        NotPeriodicError: Segments of any length do not repeat.
    """
    while True:
        program = build(steps)
        try:
            return step_graph(program, reduced=reduced, norm=norm), program
        except NotPeriodicError:
            if steps > 64 + 4 * (microbatches_to_fill(program) // program.microbatches):
                raise
        steps *= 2


def step_graph(
    program: Program,
    *,
    reduced: Sequence[bool] | bool = False,
    norm: bool = True,
    is_flushed: bool = False,
) -> StepGraph:
    """The graph of the steady state in the middle of `program`, which must be valid (see `verify`).

    Args:
        program: Its first and its last steps may differ from those between.
        reduced: For each stage, or for all, whether its update waits for a reduction.
        norm: Whether updates wait for a gradient norm, where stages update together.
        is_flushed: Whether every step ends before the next begins, as with a norm: all are like the last one,
            if there is another before it.

    Raises:
        NotPeriodicError: The middle of the program does not repeat.
    """
    norm = norm and program.updates_together
    each = (reduced,) * program.num_stages if isinstance(reduced, bool) else reduced
    waits = tuple(norm or of_stage for of_stage in each)
    for steps in range(1, MOST_STEPS_REPEATED + 1):
        middle = (program.steps // steps + 1) // 2
        taken = (program.steps - 1,) * 2 if is_flushed else (middle - 1, middle)
        periods = _Periods(program, waits, norm=norm, steps=steps, taken=taken)
        if (edges := periods.repeated()) is not None:
            return StepGraph(
                steps=steps,
                takes=tuple((op, stage) for stage, op, _ in periods.keys),
                edges=edges,
                delays=tuple(periods.delays),
                work=tuple(periods.work_of(rank) for rank in range(program.num_ranks)),
                reduced=waits,
                norm=norm,
            )
    counted = f"{program.steps} step{'s' * (program.steps > 1)}"
    raise NotPeriodicError(f"{program.schedule}: the middle of its {counted} does not repeat")


_TimedEdges = Sequence[Sequence[tuple[int, int, float]]]
"""For each node and each of its edges, the node before, the height, and the time from that node's end to its
own."""
_Followers = list[list[tuple[int, int]]]
"""For each node, the nodes that wait for it, and which of their edges it is."""


_Turn = tuple[int, int]
"""A node's number, and the period of one of its turns."""


class _Periods:
    """Two periods of a program that follow each other, with what each of their nodes waits for.

    A node is an action of a period: its stage, its op, and the number of its micro-batch, or of its version,
    within the period.
    """

    def __init__(
        self, program: Program, waits: tuple[bool, ...], *, norm: bool, steps: int, taken: tuple[int, int]
    ) -> None:
        self.program, self.waits, self.norm, self.steps, self.taken = program, waits, norm, steps, taken
        self.microbatches = steps * program.microbatches
        self.versions = self.microbatches // program.update_interval
        self.numbers: dict[tuple[int, Op, int], int] = {}
        """Number of each node, by stage, op, and micro-batch or version within the period; rank by rank."""
        self.by_rank: list[range] = []
        self.delays: dict[Channel | int | None, int] = {None: 0}
        self.back: dict[_Turn, _Turn] = {}
        """For each turn of the two periods, the one before it on its rank."""
        self.issued: dict[tuple[int, int], _Turn] = {}
        """For each version and stage, the turn with which its gradient is complete, where updates wait."""
        self.awaited: dict[_Turn, tuple[int, list[int]]] = {}
        """For each turn of an update that waits, its version, and the stages whose gradients it needs."""
        self.senders = self._senders()
        for rank in range(program.num_ranks):
            known = len(self.numbers)
            self._walk(rank)
            self.by_rank.append(range(known, len(self.numbers)))
        self.keys = list(self.numbers)

    def _senders(self) -> dict[tuple[int, Op], list[tuple[int, Op, int]]]:
        """For each stage and op, the stages and ops whose messages it may wait for, and the numbers of the
        messages' delays."""
        sent: dict[Channel, list[Op]] = defaultdict(list)
        ends = channel_ends(self.program)
        for (_, op), of_op in ends.items():
            for channel in of_op.sends:
                if op not in sent[channel]:
                    sent[channel].append(op)
        senders: dict[tuple[int, Op], list[tuple[int, Op, int]]] = {}
        for key, of_op in ends.items():
            senders[key] = []
            for channel in of_op.receives:
                delay = self._number_of(None if is_local(channel, self.program) else channel)
                senders[key] += [(channel.source, sender, delay) for sender in sent[channel]]
        return senders

    def _number_of(self, delay: Channel | int | None) -> int:
        return self.delays.setdefault(delay, len(self.delays))

    def _walk(self, rank: int) -> None:
        """Put the actions of a rank, and updates where they are performed, one behind the other."""
        program, waits, update = self.program, self.waits, Op.UPDATE
        first_microbatch = program.first_step * program.microbatches
        first_version = program.initial_versions[-1] + 1
        numbers, back, taken = self.numbers, self.back, self.taken
        pending: dict[int, int] = {}
        latest: _Turn | None = None

        def follow(stage: int, op: Op, number: int, a_period: int) -> None:
            nonlocal latest
            period, within = divmod(number, a_period)
            turn = numbers.setdefault((stage, op, within), len(numbers)), period
            if latest is not None and period in taken:
                back[turn] = latest
            latest = turn

        def perform(stage: int) -> None:
            """An update that waits, and those of the rank's other stages that are one with it."""
            version = pending[stage]
            together = [stage]
            if self.norm:
                together = sorted(other for other, known in pending.items() if known == version)
            for place, each in enumerate(together):
                follow(each, update, version - first_version, self.versions)
                waited_for = range(program.num_stages) if self.norm else together
                if place == 0 and latest is not None:
                    self.awaited[latest] = version, list(waited_for)
                del pending[each]

        for stage, op, microbatch, version in program.actions[rank]:
            if stage in pending and version >= pending[stage]:
                perform(stage)
            if op is not update:
                follow(stage, op, microbatch - first_microbatch, self.microbatches)
            elif waits[stage]:
                pending[stage] = version
                if latest is not None:
                    self.issued[version, stage] = latest
            else:
                follow(stage, update, version - first_version, self.versions)
        while pending:
            perform(min(pending))

    def repeated(self) -> tuple[tuple[Edge, ...], ...] | None:
        """For each node, what it waits for; None where the two periods differ."""
        try:
            first, second = (
                tuple(self._edges(node, period) for node in range(len(self.numbers))) for period in self.taken
            )
        except KeyError:
            return None
        return first if first == second and self._is_an_order(first) else None

    def work_of(self, rank: int) -> tuple[tuple[Op, int, int], ...]:
        """How often a rank does each op of each of its stages."""
        counts = Counter((op, stage) for stage, op, _ in (self.keys[node] for node in self.by_rank[rank]))
        return tuple((op, stage, count) for (op, stage), count in counts.items())

    def _edges(self, node: int, period: int) -> tuple[Edge, ...]:
        """What a node's turn waits for: first the one before it on its rank.

        Raises:
            KeyError: The program does not have all of it.
        """
        turn, (stage, op, within), numbers = (node, period), self.keys[node], self.numbers
        before, then = self.back[turn]
        edges = [(before, period - then, 0)]
        if turn in self.awaited:
            version, stages = self.awaited[turn]
            for other in stages:
                before, then = self.issued[version, other]
                edges.append((before, period - then, self._number_of(other)))
        for source, sender, delay in self.senders[stage, op]:
            if (sent := numbers.get((source, sender, within))) is not None:
                edges.append((sent, 0, delay))
        return tuple(edges)

    def _is_an_order(self, edges: Sequence[Sequence[Edge]]) -> bool:
        """Whether periods with these edges, one behind the other, have every action of a rank in one order.

        Fills and drains can repeat, too, but in them a node follows two others.
        """
        for of_rank in self.by_rank:
            at, height, left = of_rank.start, 0, set(of_rank)
            while at in left:
                left.remove(at)
                at, further, _ = edges[at][0]
                height += further
            if left or at != of_rank.start or height != 1:
                return False
        return True


def _largest_ratio(edges: _TimedEdges, policy: Iterable[int]) -> tuple[float, tuple[int, ...]]:
    """The largest quotient of time and height around a cycle, and the policy that has it.

    Args:
        edges: Of a graph where each node can be reached from each: ranks send messages both ways.
        policy: For each node, the edge to begin with.
    """
    best = list(policy)
    behind: _Followers = [[] for _ in edges]
    for node, waits in enumerate(edges):
        for which, (before, _, _) in enumerate(waits):
            behind[before].append((node, which))
    rounding = 1e-12 * sum(max(time for _, _, time in waits) for waits in edges)
    ratio, value = float("-inf"), [0.0] * len(edges)
    for _ in range(MOST_ITERATIONS):
        found, root = _largest_of_chosen([waits[which] for waits, which in zip(edges, best, strict=True)])
        if found > ratio:
            ratio = found
            value = _values(edges, behind, best, ratio=ratio, root=root)
        better = False
        # In the order of their ends, so that what one node gains reaches those after it at once.
        for node in sorted(range(len(edges)), key=value.__getitem__):
            latest = value[node] + rounding
            for which, (before, height, time) in enumerate(edges[node]):
                end = value[before] + time - ratio * height
                if end > latest:
                    value[node], best[node], better = end, which, True
                    latest = end + rounding
        if not better:
            return ratio, tuple(best)
    raise ArithmeticError(f"the time of a step is not found in {MOST_ITERATIONS} iterations")


def _values(
    edges: _TimedEdges, behind: _Followers, policy: list[int], *, ratio: float, root: int
) -> list[float]:
    """For each node, the time of its way from `root` by the policy's edges, less `ratio` for each period.

    Nodes that the policy leads to another cycle get an edge that leads them to `root`.
    """
    value, known, reached = [0.0] * len(edges), [False] * len(edges), []
    led: list[list[tuple[int, float]]] = [[] for _ in edges]
    for node, waits in enumerate(edges):
        before, height, time = waits[policy[node]]
        led[before].append((node, time - ratio * height))

    def reach(start: int) -> None:
        known[start], left = True, [start]
        while left:
            before = left.pop()
            reached.append(before)
            for node, seconds in led[before]:
                if not known[node]:
                    value[node], known[node] = value[before] + seconds, True
                    left.append(node)

    reach(root)
    for before in reached:
        if len(reached) == len(edges):
            break
        for node, which in behind[before]:
            if not known[node]:
                _, height, time = edges[node][which]
                value[node], policy[node] = value[before] + time - ratio * height, which
                reach(node)
    return value


def _largest_of_chosen(chosen: Sequence[tuple[int, int, float]]) -> tuple[float, int]:
    """The largest quotient of a cycle where each node has one edge, and a node of that cycle."""
    largest, root = float("-inf"), -1
    walk_of = [-1] * len(chosen)
    for begin in range(len(chosen)):
        at = begin
        while walk_of[at] < 0:
            walk_of[at] = begin
            at = chosen[at][0]
        if walk_of[at] != begin:
            continue
        total, height, end = 0.0, 0, at
        while height == 0 or at != end:
            before, further, time = chosen[at]
            total, height, at = total + time, height + further, before
        if total / height > largest:
            largest, root = total / height, end
    return largest, root
