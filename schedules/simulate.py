"""Simulates a program under a cost model: when every action starts and ends.

Each rank performs its list in order and starts an action when the rank is free and the action's message has
arrived. A message takes `costs.transfer`, longer where others share its links (see `schedules.links`), and
arrives `costs.latency` later. Each rank is advanced as far as it can go, again and again, so that every
action is looked at once.

An update that waits (for the data-parallel reduction, for the gradient norm over all stages) is
performed just before the first reader of its version, or before the stage's next update: the actions between
hide the wait.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from schedules.actions import Op, Program
from schedules.costs import Costs, durations
from schedules.links import Links, Transfer
from schedules.messages import Channel, Kind, channel_ends

_NONE_PENDING = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every action of a program starts and ends, by rank and place in the rank's list."""

    program: Program
    starts: tuple[array[float], ...]
    ends: tuple[array[float], ...]

    @property
    def makespan(self) -> float:
        """The time from the first action's start to the last one's end."""
        return max(max(rank_ends, default=0.0) for rank_ends in self.ends)


def simulate(program: Program, costs: Costs) -> Timeline:
    """The timeline of `program`, which must be valid (see `verify`), under `costs`."""
    return _Simulation(program, costs).run()


class _Route(NamedTuple):
    """What a message of a channel does."""

    receiver: int | None
    """Rank that it reaches, if that is another one."""
    latency: float
    shared: Channel | None
    """The channel, if its messages share links with others."""
    arrivals: list[float]
    """By micro-batch, when the receiving stage has all that it waits for."""
    parts: list[list[float]] | None
    """By micro-batch, what has been sent so far, where that is one part per shard."""


class _Simulation:
    """The state of a simulation: progress of each rank, and arrival of each message."""

    def __init__(self, program: Program, costs: Costs) -> None:
        count = program.steps * program.microbatches
        stages = program.num_stages
        self.program = program
        self.costs = costs
        no_time = [[0.0] * count] * stages
        self.durations = {op: times or no_time for op, times in durations(program, costs).items()}
        self.first = program.first_step * program.microbatches
        self.position = [0] * program.num_ranks
        self.clock = [0.0] * program.num_ranks
        self.starts = [array("d", bytes(8 * len(actions))) for actions in program.actions]
        self.ends = [array("d", bytes(8 * len(actions))) for actions in program.actions]
        # When the activations and the gradient that a micro-batch needs at a stage arrive; -1: unknown.
        # For a shard of the head, those of the hidden states and of the softmax's sums.
        self.activations_at = [[-1.0] * count for _ in range(stages)]
        self.gradient_at = [[-1.0] * count for _ in range(stages)]
        self.of_embedded_at = [[-1.0] * count for _ in range(stages if program.tied_shards else 0)]
        if not program.tied_shards:
            self.activations_at[0] = [0.0] * count
        if not program.head_shards:
            self.gradient_at[-1] = [0.0] * count
        self.waits_for = {
            Op.FORWARD: self.activations_at,
            Op.HEAD: self.activations_at,
            Op.BACKWARD: self.gradient_at,
            Op.BACKWARD_INPUT: self.gradient_at,
            Op.HEAD_WEIGHT: self.gradient_at,
            Op.EMBED_WEIGHT: self.of_embedded_at,
        }
        # Of what a stage needs from all shards, what has been sent so far.
        self.parts_at: list[list[float]] = [[] for _ in range(count if program.head_shards else 0)]
        self.embedded_at: list[list[float]] = [[] for _ in range(count if program.tied_shards else 0)]
        self.routes = {
            key: [self._route(channel, costs.latency_of(channel)) for channel in ends.sends]
            for key, ends in channel_ends(program).items()
        }
        self.links: Links[tuple[_Route, int]] = Links()
        self.pending_version = [_NONE_PENDING] * stages
        self.pending_place = [0] * stages
        self.reduced_at = [0.0] * stages
        self.stages_of = [
            [stage for stage, holder in enumerate(program.rank_of_stage) if holder == rank]
            for rank in range(program.num_ranks)
        ]
        self.norm = costs.norm if program.updates_together else None
        self.norm_waits_for: dict[int, int] = {}
        self.norm_at: dict[int, float] = {}
        self.runnable = deque(range(program.num_ranks))
        self.queued = [True] * program.num_ranks

    def run(self) -> Timeline:
        self._play_all()
        # Every rank waits, so whatever is sent from here on is sent after the next arrival.
        while (arrived := self.links.next_arrival()) is not None:
            now, (route, index) = arrived
            self._arrive(route, index, now)
            self._play_all()
        return Timeline(program=self.program, starts=tuple(self.starts), ends=tuple(self.ends))

    def _play_all(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            self.queued[rank] = False
            self._play(rank)

    def _play(self, rank: int) -> None:
        """Advance `rank` until it waits for another rank or is done."""
        durations, pending_version, update = self.durations, self.pending_version, Op.UPDATE
        actions = self.program.actions[rank]
        starts, ends = self.starts[rank], self.ends[rank]
        first, routes, waits_for = self.first, self.routes, self.waits_for
        place, now = self.position[rank], self.clock[rank]
        while place < len(actions):
            stage, op, microbatch, version = actions[place]
            if version >= pending_version[stage]:
                done = self._finish_update(rank, stage, now)
                if done < 0:
                    break
                now = done
            start = now
            if op is update:
                now = self._issue_update(stage, version, place, now)
            else:
                index = microbatch - first
                if (arrivals := waits_for.get(op)) is not None:
                    arrived = arrivals[stage][index]
                    if arrived < 0:
                        break
                    start = now if now >= arrived else arrived
                now = start + durations[op][stage][index]
                if channels := routes[stage, op]:
                    self._send(rank, channels, index, now)
            starts[place] = start
            ends[place] = now
            place += 1
        else:
            now = self._finish_all(rank, now)
        self.position[rank], self.clock[rank] = place, now

    def _route(self, channel: Channel, latency: float) -> _Route:
        rank_of_stage, kind = self.program.rank_of_stage, channel.kind
        parts = {Kind.PART: self.parts_at, Kind.EMBEDDED: self.embedded_at}.get(kind)
        forward = kind in (Kind.ACTIVATIONS, Kind.HIDDEN, Kind.EMBEDDED)
        arrivals = self.activations_at if forward else self.gradient_at
        if kind is Kind.OF_EMBEDDED:
            arrivals = self.of_embedded_at
        receiver = rank_of_stage[channel.destination]
        if receiver == rank_of_stage[channel.source]:
            return _Route(None, 0.0, None, arrivals[channel.destination], parts)
        shared = channel if self.costs.transfer and kind is not Kind.SUMS else None
        return _Route(receiver, latency, shared, arrivals[channel.destination], parts)

    def _send(self, rank: int, routes: list[_Route], index: int, now: float) -> None:
        for route in routes:
            if route.shared is None or route.receiver is None:
                self._arrive(route, index, now)
            else:
                transfer = Transfer(
                    channel=route.shared,
                    sender=rank,
                    receiver=route.receiver,
                    content=(route, index),
                    left=self.costs.transfer,
                )
                self.links.send(transfer, at=now)

    def _arrive(self, route: _Route, index: int, now: float) -> None:
        receiver, latency, _, arrivals, parts = route
        arrival = now + latency
        if parts is not None:
            known = parts[index]
            known.append(arrival)
            if len(known) < self.program.head_shards:
                return
            arrival = max(known)
        arrivals[index] = arrival
        if receiver is not None:
            self._wake(receiver)

    def _wake(self, rank: int) -> None:
        if not self.queued[rank]:
            self.queued[rank] = True
            self.runnable.append(rank)

    def _issue_update(self, stage: int, version: int, place: int, now: float) -> float:
        """Perform the update, or start its collectives; returns when the rank can go on."""
        reduction, norm = self.costs.reduction[stage], self.norm
        if reduction == 0 and norm is None:
            return now + self.costs.update[stage]
        self.pending_version[stage], self.pending_place[stage] = version, place
        self.reduced_at[stage] = now + reduction
        if norm is not None:
            waits_for = self.norm_waits_for.get(version, self.program.num_stages) - 1
            self.norm_waits_for[version] = waits_for
            self.norm_at[version] = max(self.norm_at.get(version, 0.0), now + reduction)
            if waits_for == 0:
                self.norm_at[version] += norm
                for rank in range(self.program.num_ranks):
                    self._wake(rank)
        return now

    def _finish_update(self, rank: int, stage: int, now: float) -> float:
        """Perform a pending update, and those of the rank's other stages that are one with it; returns when
        all are done, or -1 if the norm is not known yet."""
        version = self.pending_version[stage]
        unit = [stage]
        if self.norm is not None:
            if self.norm_waits_for[version]:
                return -1.0
            now = max(now, self.norm_at[version])
            unit = [other for other in self.stages_of[rank] if self.pending_version[other] == version]
        for each in unit:
            start = max(now, self.reduced_at[each])
            now = start + self.costs.update[each]
            self.starts[rank][self.pending_place[each]] = start
            self.ends[rank][self.pending_place[each]] = now
            self.pending_version[each] = _NONE_PENDING
        return now

    def _finish_all(self, rank: int, now: float) -> float:
        """At the end of a rank's list, perform the pending updates of its stages, as far as possible."""
        for stage in self.stages_of[rank]:
            if self.pending_version[stage] != _NONE_PENDING:
                done = self._finish_update(rank, stage, now)
                if done >= 0:
                    now = done
        return now


def fill_steps(program: Program) -> int:
    """Steps in which the pipeline fills."""
    return -(-microbatches_to_fill(program) // program.microbatches)


def microbatches_to_fill(program: Program) -> int:
    """Micro-batches with which the pipeline is full."""
    return max(program.loss_stage + 1, _lead(program))


def _lead(program: Program) -> int:
    """Micro-batches that enter the pipeline before the first comes back."""
    ops = (action.op for action in program.stage_actions(0))
    return sum(1 for _ in takewhile(lambda op: op is Op.FORWARD, ops))


def segment_step_time(timeline: Timeline) -> float | None:
    """Time of a step within a segment, fill and drain aside; None where those are all of it.

    A pipeline that takes longer to settle has another one in the long run (see `schedules.step_time`).
    """
    program = timeline.program
    fill = fill_steps(program)
    first, last = fill, program.steps - 1 - fill
    return seconds_between(timeline, first, last) if last > first else None


def seconds_between(timeline: Timeline, first: int, last: int) -> float:
    """Time of a step, as a mean over those after `first` up to `last`, numbered within the segment, and over
    the ranks: from the end of one step's last backward to that of the next one's."""
    total = 0.0
    for marks, ends in zip(timeline.program.ends_of_steps, timeline.ends, strict=True):
        total += ends[marks[last]] - ends[marks[first]]
    return total / (last - first) / timeline.program.num_ranks
