"""Estimates memory and step time of a run from its configuration and the costs of the model's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from asyncpp_cli.planner.cuts import WORTH_A_CUT, cuts_to_try
from asyncpp_cli.planner.memory import GB, RankMemory
from asyncpp_cli.planner.shared import CostModel, Shared, own_cut_of, recomputing
from asyncpp_cli.planner.stage_times import StageTimes, StepTime
from stages.config.places import PIPELINE
from stages.config.run_config import RunConfig, tokens_per_step
from stages.config.segments import schedule_facts
from stages.memory.estimate import StageMemory, planned_on_gpu, stage_memory


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
    shared: Shared = field(compare=False, repr=False)

    @cached_property
    def memory(self) -> tuple[dict[str, int], ...]:
        """Bytes of each rank at its fullest moment, by kind: those of `StageMemory`, `messages`, `reduction`,
        `temporary` and those `OF_THE_DEVICE`. Its stages need not hold their most at once.

        Messages take longer to count than all else, so they are where this is read.
        """
        return tuple(RankMemory(self.config, self.shared).of_cut(self.cut))

    @property
    def name(self) -> str:
        """Name of the layout in tables: its schedule with the options that it has."""
        schedule, ranks = self.config.schedule, self.config.parallel.stages
        several = len(self.cut) > ranks and self.rank_of_stage[ranks] == 0
        words = [f"{schedule.name} x {len(self.cut) // ranks}" if several else schedule.name]
        words += ["split"] * schedule.split + [f"ahead {schedule.ahead}"] * (schedule.ahead > 1)
        words += ["pipelines within nodes"] * (self.config.site.neighbours == PIPELINE)
        return ", ".join(words + ["head in shards"] * self.config.parallel.shard_head)

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
        config = replace(self.config, parallel=replace(self.config.parallel, cut=self.cut))
        program, data = self.shared.program(config), config.parallel.data
        buffers = program.buffers(data_ranks=data, on_gpu=planned_on_gpu(config))
        return stage_memory(config, program.course, gradient_buffers=buffers)

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
        return not RankMemory(self.config, self.shared).fits(self.cut, limit_gb=limit_gb)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all ranks read, per second."""
        return tokens_per_step(self.config) / self.step.seconds

    @cached_property
    def losses(self) -> dict[str, float]:
        """Shares of the step, in 0..1: waiting for slower stages (`imbalance`), for messages and reductions
        (`network`), and else (`bubble`); and recomputation (`memory`)."""
        config, shared, stages = self.config, self.shared, len(self.cut)
        times = shared.times(config, self.cut)
        none = (0.0,) * len(times.forward)
        unlinked = replace(times, message=none, reduction=none)

        def even(of_stages: tuple[float, ...]) -> tuple[float, ...]:
            return (*(sum(of_stages[:stages]) / stages,) * stages, *of_stages[stages:])

        kinds = ("forward", "backward", "input_half", "weight_half", "update")
        equal = replace(unlinked, **{kind: even(getattr(times, kind)) for kind in kinds})
        seconds = self.step.seconds
        alone, alike = (step_with(config, shared, each).seconds for each in (unlinked, equal))
        network, imbalance = max(0.0, 1 - alone / seconds), max(0.0, (alone - alike) / seconds)
        again = sum(recomputing(config, block) for block in shared.parts(config).blocks)
        return {
            "bubble": max(0.0, self.step.bubble - network - imbalance),
            "imbalance": imbalance,
            "network": network,
            "memory": config.schedule.microbatches * again / config.parallel.stages / seconds,
        }


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
    shared = Shared(costs)
    cuts = cuts_to_try(config, shared, limit_gb=limit_gb)
    return best_of(cuts, config, shared) if cuts else own_estimate(config, shared)


def own_estimate(config: RunConfig, shared: Shared) -> Estimate:
    """The estimate of a run with its own cut, or the default one."""
    return _with_cut(config, own_cut_of(config), shared)


def best_of(cuts: Sequence[Sequence[float]], config: RunConfig, shared: Shared) -> Estimate:
    """The estimate of a run with the first of some cuts, unless another is faster by `WORTH_A_CUT`."""
    first, *others = cuts
    best = _with_cut(config, first, shared)
    for cut in others:
        worth = (1 - WORTH_A_CUT) * best.step.seconds
        if least_with(config, shared, shared.times(config, cut)) <= worth:
            found = _with_cut(config, cut, shared)
            best = found if found.step.seconds <= worth else best
    return best


def _with_cut(config: RunConfig, sizes: Sequence[float], shared: Shared) -> Estimate:
    program = shared.program(config)
    return Estimate(
        config=config,
        cut=tuple(sizes),
        rank_of_stage=program.rank_of_stage,
        step=step_with(config, shared, shared.times(config, sizes)),
        delay=program.delay,
        shared=shared,
    )


def least_with(config: RunConfig, shared: Shared, times: StageTimes) -> float:
    """A lower bound of the seconds of a step whose stages take so long: what the fullest rank does and waits
    for; without updates that stages make on their own: a cut that memory asks for may have shorter ones."""
    facts, ranks, microbatches = (
        schedule_facts(config),
        shared.placement(config),
        config.schedule.microbatches,
    )
    of_microbatch = list(map(min, times.microbatch, times.split_microbatch))
    works, updating = ([0.0] * config.parallel.stages for _ in range(2))
    reducing = [inf] * len(works)
    for stage, rank in enumerate(ranks):
        works[rank] += microbatches * of_microbatch[stage]
        updating[rank] += times.update[stage] if facts.updates_together else 0.0
        reducing[rank] = min(reducing[rank], times.reduction[stage])
    if not facts.synchronous:
        return max(a + b for a, b in zip(works, updating, strict=True))
    most, forwards, backwards = 0.0, 0.0, 0.0
    whole = not (len(works) > 1 and shared.nature(config).splits)
    for rank, work in enumerate(works):
        # A rank waits for the first forwards of the stages before it, and the first stage's update for its
        # gradient, and for that of the first stage, which the backwards of the stages between precede.
        ended = max(reducing[rank], (backwards + reducing[0]) * whole)
        most = max(most, forwards + work + ended + updating[0], work + reducing[rank] + updating[rank])
        forwards += times.forward[rank] + times.message[rank]
        backwards += times.backward[rank] + times.message[rank]
    return most


def step_with(config: RunConfig, shared: Shared, times: StageTimes) -> StepTime:
    """The step of a run whose stages take so long."""
    program = shared.program(config)
    pace = 0.0 if program.geometry.is_flushed else shared.pace(config).seconds(times)
    if not (config.parallel.shard_gradients and program.program.updates_together):
        return program.step(times, pace=pace)
    # The next backward waits for the reduction, which therefore counts as an update. It is not work.
    updating = tuple(a + b for a, b in zip(times.update, times.reduction, strict=True))
    step = program.step(replace(times, update=updating, reduction=(0.0,) * len(updating)), pace=pace)
    waiting = sum(times.reduction) / config.parallel.stages / step.seconds
    return replace(step, bubble=step.bubble + waiting)
