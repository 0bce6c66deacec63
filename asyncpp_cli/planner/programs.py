"""A short program that stands for that of a layout: what its ranks hold, how late its gradients are, and how
long a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import gcd, lcm
from typing import Any, NamedTuple

import schedules
from asyncpp_cli.planner.stage_times import StageTimes, StepTime, costs_of
from asyncpp_cli.planner.steady_state import SteadyState
from schedules import Op
from schedules.analyze import staleness
from schedules.costs import Costs
from schedules.deadlock import UNACKNOWLEDGED, sends_in_flight
from schedules.dependencies import POSTED_AHEAD, most_messages
from schedules.head_shards import EMBEDDED_AHEAD
from schedules.messages import Kind, RankLinks, channel_ends, links_of_ranks
from schedules.simulate import fill_steps, seconds_between, simulate
from schedules.step_time import NotPeriodicError, step_graph, step_graph_of
from stages.config.run_config import RunConfig
from stages.config.segments import has_tied_shards, schedule_facts, schedule_options
from stages.memory.estimate import Course, course_of
from stages.resolve.schedule import tied_problem
from stages.weights.gradient_buffers import gradient_buffers

PERIOD = 6
"""Micro-batches after which the order of actions repeats within a step, or a multiple of it."""
_ROUNDED = 1 - 1e-9
"""Sums of the same times in another order differ by less than this share."""
BUSY_LINK = 0.5
"""Share of its time from which a link's messages are taken to wait for one another. A rank with several
stages sends as many messages for each micro-batch as all of them; below this share they hardly meet."""


class Shape(NamedTuple):
    """What a program depends on, but for its steps; the last two are as in `schedules.build`."""

    name: str
    stages: int
    microbatches: int
    options: tuple[tuple[str, Any], ...]
    shard_head: bool
    tied: bool

    def build(self, steps: int) -> schedules.Program:
        """The program of a segment in the middle of a run.

        Raises:
            schedules.ScheduleError: the schedule cannot be built for these numbers.
        """
        options = dict(self.options)
        return schedules.build(
            self.name,
            stages=self.stages,
            microbatches=self.microbatches,
            steps=steps,
            shard_head=self.shard_head,
            tied=self.tied,
            # So many steps in, the first one reads as old a version as any.
            first_step=options.get("delay", 0),
            **options,
        )


class Geometry(NamedTuple):
    """The program that stands for a layout's."""

    shape: Shape
    further: int
    """Micro-batches of a step of the run beyond those of the program: more than these change neither memory
    nor delay, and each takes as long as the others."""
    period: int
    """Micro-batches by which a longer program is as like the run's."""
    is_flushed: bool
    """Whether its steps end before the next begin."""

    @classmethod
    def of(cls, config: RunConfig) -> Geometry:
        """The geometry of a layout."""
        schedule, ranks, tied = config.schedule, config.parallel.stages, has_tied_shards(config)
        options, microbatches = schedule_options(config), schedule.microbatches
        shard_head = config.parallel.shard_head
        facts, interval = schedule_facts(config), options.get("update_interval", 1)
        declared = schedules.KNOWN.get(schedule.name)
        in_rounds = facts.stages > ranks and declared is not None and "chunks" in declared.options
        period = ranks if in_rounds else lcm(PERIOD, 1 if interval == microbatches else interval)
        enough = (2 * options.get("ahead", 1) + shard_head) * ranks
        few = enough + (microbatches - enough) % period
        is_like = declared is not None and declared.bounded_activations and not microbatches % interval
        if not is_like or microbatches <= few or (in_rounds and microbatches % ranks):
            few = microbatches
        if interval == microbatches:
            options = options | ({"update_interval": few} if "update_interval" in options else {})
        shape = Shape(schedule.name, ranks, few, tuple(options.items()), shard_head, tied)
        return cls(shape, microbatches - few, period, facts.synchronous)


class OfRanks:
    """The ranks of a program, and what they hold."""

    def __init__(self, program: schedules.Program) -> None:
        self.program = program

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage, shards of the head among them."""
        return self.program.rank_of_stage

    @cached_property
    def stages_of_rank(self) -> list[list[int]]:
        """The stages of each rank, ascending."""
        stages: list[list[int]] = [[] for _ in range(self.program.num_ranks)]
        for stage, rank in enumerate(self.rank_of_stage):
            stages[rank].append(stage)
        return stages

    @property
    def links(self) -> Sequence[RankLinks]:
        """The communicators and channels of each rank."""
        return links_of_ranks(
            self.rank_of_stage, head_shards=self.program.head_shards, tied_shards=self.program.tied_shards
        )


class LayoutProgram(OfRanks):
    """The facts of a layout's program; each is found when it is asked for.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        shape = geometry.shape
        self._steady: dict[bool, SteadyState] = {}
        self._messages: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._buffers: dict[tuple[bool, bool], Sequence[int]] = {}
        # A step behind another where the pipeline is flushed; else two that are alike, behind those in which
        # it fills and updates are still to come, and before those in which it drains.
        options = dict(shape.options)
        lead = options.get("ahead", 1) * shape.stages + shape.shard_head
        first = max(-(-lead // shape.microbatches), options.get("delay", 1) + 1)
        super().__init__(shape.build(2 if geometry.is_flushed else 2 * first + 2))
        self._splits = self.program.split_backward

    @cached_property
    def _course(self) -> tuple[Course, int]:
        delays = staleness(self.program)
        return course_of([self.program], [delays]), max(delays.delay_max)

    @property
    def course(self) -> Course:
        """What its memory depends on."""
        return self._course[0]

    @property
    def delay(self) -> int:
        """The most updates between the weights a gradient is computed at and those it is applied to."""
        return self._course[1]

    def buffers(self, *, data_ranks: int, on_gpu: bool) -> Sequence[int]:
        """Gradient buffers of each stage."""
        key = data_ranks > 1, on_gpu
        if key not in self._buffers:
            self._buffers[key] = gradient_buffers([self.program], data_ranks=data_ranks, on_gpu=on_gpu)
        return self._buffers[key]

    @cached_property
    def is_tieable(self) -> bool:
        """Whether embedding and head can share a matrix (`model.tied`)."""
        return self.program.tied_shards or tied_problem(self.program) is None

    @cached_property
    def _in_flight(self) -> int:
        return sends_in_flight(self.program)

    def messages(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The most bytes of messages that each rank holds at once, from those of a message of each kind, in
        the order of `Kind`."""
        # One count serves every size of a micro-batch.
        unit = gcd(*sizes)
        weights = tuple(size // unit for size in sizes)
        if weights not in self._messages:
            self._messages[weights] = tuple(
                most_messages(
                    self.program,
                    common_step=self.program.updates_together,
                    in_flight=self._in_flight,
                    weights=dict(zip(Kind, weights, strict=True)),
                )
            )
        return tuple(unit * count for count in self._messages[weights])

    def messages_at_most(self, sizes: Sequence[int]) -> list[int]:
        """An upper bound of `messages`, which takes less time: on each channel what a rank has posted, or has
        sent and not got acknowledged; and between stages of one rank the micro-batches in flight."""
        program, ranks, bytes_of = self.program, self.rank_of_stage, dict(zip(Kind, sizes, strict=True))
        in_flight = [max(map(sum, counts), default=0) for counts in self.course.in_flight]
        held, waiting = [0] * program.num_ranks, Counter[tuple[int, int, Kind]]()
        for (_, op), ends in channel_ends(program).items():
            for source, destination, kind in ends.sends if op is not Op.BACKWARD_INPUT else ():
                sender, receiver = ranks[source], ranks[destination]
                if sender == receiver:
                    held[sender] += bytes_of[kind] * (in_flight[source] + EMBEDDED_AHEAD + 1)
                elif kind in (Kind.EMBEDDED, Kind.OF_EMBEDDED):
                    waiting[sender, receiver, kind] += program.steps * program.microbatches
                else:
                    # The answers to what is in flight acknowledge what was sent before it.
                    holder = destination if kind is Kind.SUMS else min(source, destination)
                    waiting[sender, receiver, kind] += in_flight[holder]
        for (sender, receiver, kind), most in waiting.items():
            most = most if most <= UNACKNOWLEDGED else min(most, self._in_flight)
            held[sender] += bytes_of[kind] * (most + 1)
            held[receiver] += bytes_of[kind] * (POSTED_AHEAD + 1)
        return held

    def step(self, times: StageTimes, *, pace: float) -> StepTime:
        """The steady state of a step of the run whose stages take so long.

        Args:
            times: of the stages.
            pace: seconds after which the next micro-batch can follow, at least (`Pace`); 0 of steps that are
                flushed. A short program may not show it, since its update takes longer than its messages.
        """
        geometry, program = self.geometry, self.program
        microbatches = geometry.shape.microbatches + geometry.further
        of_microbatch = self._of_microbatch(times)
        several = program.update_interval < program.microbatches
        updates = microbatches / program.update_interval if several else 1
        seconds = self._seconds(self._costs(times, further=geometry.further))
        if geometry.further:
            # Of stages that update within a step, each further micro-batch brings its share of updates.
            own = [
                work + several * update / program.update_interval
                for work, update in zip(of_microbatch, times.update, strict=True)
            ]
            each = fullest = self._fullest(own)
            if not self._is_busy(seconds, times, of_microbatch):
                further = geometry.further - geometry.period
                longer = self._longer._seconds(self._costs(times, further=further))
                each = max(fullest, (longer - seconds) / geometry.period)
            seconds += geometry.further * max(each, pace)
        busy = microbatches * sum(of_microbatch) + updates * sum(times.update)
        return StepTime(seconds=seconds, bubble=max(0.0, 1 - busy / program.num_ranks / seconds))

    def _of_microbatch(self, times: StageTimes) -> tuple[float, ...]:
        """What a micro-batch takes in each stage, seconds."""
        return times.split_microbatch if self._splits else times.microbatch

    def _fullest(self, of_stages: Sequence[float]) -> float:
        """The most of what a rank's stages take, seconds."""
        return max(sum(of_stages[stage] for stage in of_rank) for of_rank in self.stages_of_rank)

    def _is_busy(self, seconds: float, times: StageTimes, of_microbatch: Sequence[float]) -> bool:
        """Whether a rank works all the time in a step of the program of so many seconds."""
        microbatches = self.program.microbatches
        updates = microbatches / self.program.update_interval
        works = [
            microbatches * work + updates * own for work, own in zip(of_microbatch, times.update, strict=True)
        ]
        return self._fullest(works) >= _ROUNDED * seconds

    @cached_property
    def _longer(self) -> LayoutProgram:
        """The program with a period of micro-batches more in each step."""
        shape, further, period, is_flushed = self.geometry
        options = dict(shape.options)
        if options.get("update_interval") == shape.microbatches:
            options["update_interval"] += period
        longer = shape._replace(microbatches=shape.microbatches + period, options=tuple(options.items()))
        return LayoutProgram(Geometry(longer, further - period, period, is_flushed))

    def _seconds(self, costs: Costs) -> float:
        """Seconds of a step of the program."""
        if costs.transfer:
            # Messages wait for others on their links, as in the simulator alone.
            fill = fill_steps(self.program)
            played = self.geometry.shape.build(2 * fill + 4)
            return seconds_between(simulate(played, costs), fill, fill + 3)
        waits = self._waits(costs)
        if waits not in self._steady:
            try:
                graph = step_graph(self.program, reduced=waits, is_flushed=self.geometry.is_flushed)
            except NotPeriodicError:
                steps = 2 * self.program.steps
                graph, _ = step_graph_of(self.geometry.shape.build, reduced=waits, steps=steps)
            self._steady[waits] = SteadyState(graph)
        return self._steady[waits].seconds(costs)

    def _waits(self, costs: Costs) -> bool:
        """Whether stages that update on their own wait for a reduction; others wait for the norm anyway."""
        return any(costs.reduction) and not self.program.updates_together

    def least_seconds(self, times: StageTimes) -> float:
        """A lower bound of the seconds of a step of the run, from what was longest where stages took other
        times; 0 before there were any."""
        further, costs = self.geometry.further, self._costs(times, further=self.geometry.further)
        waits = self._waits(costs)
        if costs.transfer or waits not in self._steady:
            return 0.0
        return self._steady[waits].least_seconds(costs) + further * self._fullest(self._of_microbatch(times))

    def _costs(self, times: StageTimes, *, further: int) -> Costs:
        """The costs of a step of the program, where the run's has so many further micro-batches. Of stages
        that update together these hide reductions later on."""
        hidden = 0.0
        if further and self.program.updates_together:
            hidden = further * self.delay * self._fullest(self._of_microbatch(times))
        blocks = self.program.loss_stage + 1
        message = max(times.message, default=0.0)
        # A stage sends a message forward and one back for each micro-batch.
        mean = sum(times.split_microbatch) / len(times.forward)
        busy = 2 * message >= BUSY_LINK * mean
        shared = busy and blocks > self.program.num_ranks and not times.head
        reduction = tuple(max(0.0, seconds - hidden) for seconds in times.reduction)
        return costs_of(replace(times, reduction=reduction), shared=shared)
