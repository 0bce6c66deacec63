"""The facts that follow from a configuration: derived here, read by everybody else. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from schedules import Program, verify
from schedules.analyze import Staleness, staleness
from stages.config.run_config import RunConfig
from stages.config.segments import ScheduleFacts, as_trained, schedule_facts, segment_program, sync_steps
from stages.shape.families import describe
from stages.shape.partition import StageCut, cut_of
from stages.shape.spec import ModelSpec
from stages.weights.gradient_buffers import gradient_buffers

MOST_ACTIONS = 1_000_000
"""Approximate maximum of actions in a segment: about 200 MB, and a second or two to build."""


@dataclass(frozen=True)
class Resolved:
    """A run as its processes train it. What takes long to derive is derived when it is first asked for."""

    config: RunConfig
    """Under a schedule that shards the model its processes are data ranks (`as_trained`)."""
    schedule: ScheduleFacts
    sync_steps: int
    """Steps at the start that are synchronous whatever the schedule."""

    @property
    def model(self) -> ModelSpec:
        return describe(self.config.model)

    @property
    def processes(self) -> int:
        """Number of ranks, over all pipelines."""
        return self.program(first_step=0, steps=1).num_ranks * self.config.parallel.data

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Shape of a message between stages: `(microbatch_size, context, width)`."""
        config = self.config
        return (config.train.microbatch_size, config.data.context, config.model.width)

    @cached_property
    def cuts(self) -> tuple[StageCut, ...]:
        """The parts of the model in each stage, shards of the head last."""
        return tuple(cut_of(self.config))

    def program(self, *, first_step: int, steps: int) -> Program:
        """The program of a segment.

        Raises:
            schedules.ScheduleError: the schedule cannot be built with these numbers.
        """
        return segment_program(self.config, first_step=first_step, steps=steps)

    def segments(self, *, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """(first step, steps) of each segment from step `start` to `end`, by default the last one. The
        pipeline drains at every evaluation, every checkpoint and the end.

        It drains in between where these are far apart, since a segment's program is held in memory.
        """
        train = self.config.train
        intervals = [interval for interval in (train.eval_interval, train.checkpoint_interval) if interval]
        actions_per_step = 2 * self.config.schedule.microbatches * self.schedule.stages
        longest = max(1, MOST_ACTIONS // actions_per_step)
        lengths = []
        first, end = start, train.steps if end is None else end
        while first < end:
            next_drain = min((first // interval + 1) * interval for interval in intervals)
            steps = min(longest, next_drain - first, end - first)
            if first < self.sync_steps:
                steps = min(steps, self.sync_steps - first)
            lengths.append((first, steps))
            first += steps
        return lengths

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """One program for each kind of segment, verified.

        These are the first, and of those under delay the first, the longest and the last: the others need no
        more versions, buffers or messages.
        """
        lengths = self.segments()
        delayed = [length for length in lengths if length[0] >= self.sync_steps] or lengths
        # Of the longest the latest: it begins with as many versions as any.
        longest = max(reversed(delayed), key=lambda length: length[1])
        chosen = sorted({lengths[0], delayed[0], longest, delayed[-1]})
        programs = tuple(self.program(first_step=first, steps=steps) for first, steps in chosen)
        for program in programs:
            verify(program)
        return programs

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        return self.programs[0].rank_of_stage

    @property
    def staleness(self) -> Staleness:
        """The largest delay, mismatch and number of versions of each stage, and the smallest delay, over all
        segments."""
        found = [staleness(program) for program in self.programs]
        return Staleness(
            *(
                tuple(map(choose, zip(*by_program, strict=True)))
                for choose, by_program in zip((min, max, max, max), zip(*found, strict=True), strict=True)
            )
        )

    def gradient_buffers(self, *, on_gpu: bool) -> list[int]:
        """Number of gradient buffers of each stage."""
        return gradient_buffers(self.programs, data_ranks=self.config.parallel.data, on_gpu=on_gpu)


def facts(config: RunConfig) -> Resolved:
    """The facts of a run, which need not be one that can be trained (`stages.resolve.checks.resolve`).

    Raises:
        schedules.ScheduleError: the schedule cannot be built with these numbers.
    """
    config = as_trained(config)
    return Resolved(config, schedule_facts(config), sync_steps(config))
