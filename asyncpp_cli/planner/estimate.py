"""Estimates memory and step time of a run from its configuration and the costs of the model's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import schedules
from asyncpp_cli.planner.cuts import WORTH_A_CUT, cuts_to_try
from asyncpp_cli.planner.planned_memory import GB, fits, planned_memory
from asyncpp_cli.planner.representative import (
    Shape,
    represented,
)
from asyncpp_cli.planner.stage_times import CostModel, layout_cuts, own_cut_of, recomputing, stage_times
from asyncpp_cli.planner.step_time import (
    StageTimes,
    StepTime,
    sharded_step,
    simulated_step,
    step_time,
    unflushed_step,
)
from schedules.simulate import steps_to_measure
from stages.config.run_config import RunConfig, changed, tokens_per_step
from stages.config.segments import (
    as_data_ranks,
    schedule_facts,
    schedule_options,
    segment_program,
    sync_steps,
)
from stages.memory.estimate import (
    StageMemory,
    stage_memory,
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory and step time of a run."""

    config: RunConfig
    cut: tuple[float, ...]
    """Number of blocks in each stage, as in `parallel.cut`."""
    rank_of_stage: tuple[int, ...]
    step: StepTime
    delay: int
    """Maximum number of updates between the weights a gradient is computed at and those it is applied to."""

    @cached_property
    def memory(self) -> tuple[dict[str, int], ...]:
        """Bytes of each rank at its fullest moment, by kind: those of `StageMemory`, `messages`, `reduction`,
        `temporary` and those `OF_THE_DEVICE`. Its stages need not hold their most at once.

        Messages take longer to count than all else, so they are where this is read.
        """
        return tuple(planned_memory(self.config, self.cut))

    @property
    def name(self) -> str:
        """Of the layout, in tables: its schedule with its options."""
        schedule = self.config.schedule
        takes_chunks = "chunks" in schedules.options_taken(schedule.name)
        name: str = schedule.name
        name += f" x {schedule.chunks}" if takes_chunks and schedule.chunks > 1 else ""
        name += ", split" * schedule.split + f", ahead {schedule.ahead}" * (schedule.ahead > 1)
        return name + ", head in shards" * self.config.parallel.shard_head

    @property
    def place(self) -> str:
        """The schedule and the ranks."""
        parallel = self.config.parallel
        stages = f"{parallel.stages} stage{'s' * (parallel.stages > 1)}"
        return f"{self.config.schedule.name} with {stages} x {parallel.data}"

    @property
    def own_cut(self) -> bool:
        """Whether `cut` is the run's own; otherwise `parallel.cut` must set it."""
        return list(self.cut) == own_cut_of(self.config)

    @property
    def stages(self) -> list[StageMemory]:
        """What each stage holds at its own peak."""
        config = changed(self.config, {"parallel.cut": tuple(self.cut)})
        run = represented(Shape.of(config))
        return stage_memory(config, run.course, gradient_buffers=run.buffers)

    @property
    def rank_gb(self) -> list[float]:
        """Memory of each rank, 10^9 bytes."""
        return [sum(kinds.values()) / GB for kinds in self.memory]

    @property
    def memory_gb(self) -> float:
        """Memory of the fullest rank, 10^9 bytes."""
        return max(self.rank_gb)

    def exceeds(self, limit_gb: float) -> bool:
        """Whether a rank needs more memory, 10^9 bytes."""
        return not fits(self.config, self.cut, limit_gb=limit_gb)

    @property
    def tokens_per_second(self) -> float:
        return tokens_per_step(self.config) / self.step.seconds


def estimate(config: RunConfig, costs: CostModel, *, limit_gb: float | None) -> Estimate:
    """Estimate memory and step time of `config`.

    Args:
        config: a valid configuration.
        costs: times of the model's parts.
        limit_gb: memory of a device, 10^9 bytes. Where `parallel.cut` is null, another cut replaces the
            default one if that does not fit or is slower. None: keep the run's own cut.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    config = as_data_ranks(config)
    return fitting(config, costs, limit_gb=limit_gb) or own_estimate(config, costs)


def own_estimate(config: RunConfig, costs: CostModel) -> Estimate:
    """As `estimate`, with the run's own cut."""
    own = own_cut_of(config)
    return _with_cut(config, own, step_of(config, own, costs))


def fitting(
    config: RunConfig,
    costs: CostModel,
    *,
    limit_gb: float | None,
    timed: Mapping[tuple[float, ...], StepTime] | None = None,
) -> Estimate | None:
    """As `estimate`, or None where no cut fits: then no time is simulated.

    `timed`: step times that are known, by cut.
    """
    best, too_large, own, known = None, False, own_cut_of(config), timed or {}
    for cut in cuts_to_try(config, costs, limit_gb=limit_gb):
        if best is not None and cut == list(best.cut):
            continue
        changed = _with_cut(config, cut, known.get(tuple(cut)) or step_of(config, cut, costs))
        # The memory that it was chosen by is interpolated.
        exceeds = limit_gb is not None and cut != own and changed.exceeds(limit_gb)
        is_faster = best is None or changed.step.seconds <= (1 - WORTH_A_CUT) * best.step.seconds
        if best is None or (is_faster and not exceeds) or (too_large and not exceeds):
            best, too_large = changed, exceeds
    return best


def _with_cut(config: RunConfig, sizes: Sequence[float], step: StepTime) -> Estimate:
    run = represented(Shape.of(config))
    return Estimate(
        # Memory is counted later, when the caller may have changed its configuration.
        config=config,
        cut=tuple(sizes),
        rank_of_stage=run.rank_of_stage,
        step=step,
        delay=run.delay,
    )


def step_of(config: RunConfig, sizes: Sequence[float], costs: CostModel) -> StepTime:
    """The step of a run with so many blocks in each stage.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    return step_with(config, stage_times(config, layout_cuts(config, sizes), costs))


def step_with(config: RunConfig, times: StageTimes) -> StepTime:
    """The step of a run whose stages take so long.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    if config.parallel.shard_gradients and schedule_facts(config).updates_together:
        # The next backward waits for the reduction, which therefore counts as an update. It is not work.
        updating = tuple(a + b for a, b in zip(times.update, times.reduction, strict=True))
        unhidden = replace(times, update=updating, reduction=(0.0,) * len(updating))
        step = _plain_step_time(config, unhidden)
        waiting = sum(times.reduction) / config.parallel.stages / step.seconds
        return replace(step, bubble=step.bubble + waiting)
    return _plain_step_time(config, times)


def _plain_step_time(config: RunConfig, times: StageTimes) -> StepTime:
    schedule, stages = config.schedule, len(times.forward)
    if schedules.is_custom(schedule.name):
        steps = steps_to_measure(stages=stages, microbatches=schedule.microbatches)
        program = segment_program(config, first_step=sync_steps(config), steps=steps + schedule.delay)
        return simulated_step(program, times)
    member = schedules.find(schedule.name)
    if config.parallel.shard_head and member.synchronous:
        return sharded_step(config, times)
    if config.parallel.shard_head or not (member.synchronous or member.unflushed):
        return unflushed_step(config, times)
    options = schedule_options(config)
    return step_time(
        schedule.name,
        times,
        microbatches=schedule.microbatches,
        update_interval=schedule.update_interval,
        chunks=stages // config.parallel.stages,
        ahead=options.get("ahead", 1),
        delay=options.get("delay"),
    )


def losses(layout: Estimate, costs: CostModel) -> dict[str, float]:
    """Shares of the step, in 0..1: waiting for slower stages (`imbalance`), for messages and reductions
    (`network`), and else (`bubble`); and recomputation (`memory`)."""
    times = stage_times(layout.config, layout_cuts(layout.config, layout.cut), costs)
    unlinked = replace(times, message=0.0, reduction=(0.0,) * len(times.reduction))
    of_head, stages = ("head", "head_weight", "embed", "embed_weight"), len(layout.cut)
    kinds: dict[str, Any] = {
        name: times for name, times in vars(unlinked).items() if name not in ("message", *of_head)
    }
    equal: dict[str, Any] = {
        name: (*(sum(times[:stages]) / stages,) * stages, *times[stages:]) for name, times in kinds.items()
    }
    seconds = layout.step.seconds
    alone = step_with(layout.config, unlinked).seconds
    even = step_with(layout.config, replace(unlinked, **equal)).seconds
    network, imbalance = max(0.0, 1 - alone / seconds), max(0.0, (alone - even) / seconds)
    bubble = max(0.0, layout.step.bubble - network - imbalance)
    again = sum(recomputing(layout.config, block) for block in costs.parts(layout.config).blocks)
    recomputed = layout.config.schedule.microbatches * again / layout.config.parallel.stages / seconds
    return {"bubble": bubble, "imbalance": imbalance, "network": network, "memory": recomputed}
