"""The programs of a run's segments, and facts of its schedule. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import schedules
from optimizers import CORRECTIONS, check_correction
from stages.config.places import Places
from stages.config.run_config import RunConfig, correction_options

SYNCHRONOUS = "1f1b"
"""The schedule of synchronous steps at the start of a run under a user's own schedule (`sync-start`)."""


class ScheduleFacts(NamedTuple):
    """What holds for every segment under the run's schedule."""

    synchronous: bool
    """Whether every gradient is applied to the weights that it was computed at."""
    updates_together: bool
    """Whether all stages update once per step, with one gradient norm; if not, each updates on its own."""
    stages: int
    """Without shards of the head."""
    placement: tuple[int, ...] | None
    """Rank of each stage, where the model is cut so that ranks are equally fast; None: so that stages are."""


def schedule_facts(config: RunConfig) -> ScheduleFacts:
    """Facts of a run's schedule: declared by a schedule of the family, derived from a user's own program.

    Raises:
        schedules.ScheduleError: the schedule cannot be built with these numbers.
    """
    name = config.schedule.name
    if schedules.is_custom(name):
        program = segment_program(config, first_step=sync_steps(config), steps=DERIVED_FROM_STEPS)
        return ScheduleFacts(
            schedules.analyze(program).synchronous, program.updates_together, program.loss_stage + 1, None
        )
    schedule = schedules.find(name)
    if schedule.sharded:
        return ScheduleFacts(schedule.synchronous, schedule.updates_together, 1, None)
    chunks = config.schedule.chunks if "chunks" in schedule.options else schedule.stages_per_rank
    placement = None if schedule.placement is None else tuple(schedule.placement(config.parallel.stages))
    return ScheduleFacts(
        schedule.synchronous, schedule.updates_together, config.parallel.stages * chunks, placement
    )


def as_trained(config: RunConfig) -> RunConfig:
    """The configuration that the processes of a run train by: the same, but under a schedule that shards the
    model (`fsdp`, `hsdp`). There all `stages` x `data` processes are data ranks of one stage, and share the
    micro-batches of a step, which reads the same sequences as one of pipelines; `parallel.cut` says nothing.

    Raises:
        schedules.ScheduleError: the micro-batches cannot be shared evenly.
    """
    if not is_sharded(config):
        return config
    parallel, microbatches = config.parallel, segment_program(config, first_step=0, steps=1).microbatches
    return replace(
        config,
        schedule=replace(config.schedule, microbatches=microbatches),
        parallel=replace(parallel, stages=1, data=parallel.stages * parallel.data, cut=None),
    )


def as_data_ranks(config: RunConfig) -> RunConfig:
    """A run under fsdp or hsdp as plain data parallelism: a pipeline of one stage that takes the same steps.

    Estimates of such a run start from it; they lack what gathering weights costs, and count whole weights.
    Other runs are returned as they are.
    """
    if not is_sharded(config):
        return config
    trained = as_trained(config)
    return replace(trained, schedule=replace(trained.schedule, name=SYNCHRONOUS))


def places_of(config: RunConfig) -> Places:
    """Which process performs which rank of a run, one that is not sharded."""
    return Places(config.parallel.stages, config.parallel.data, config.site.neighbours)


def is_sharded(config: RunConfig) -> bool:
    """Whether the processes of a run are data ranks that hold the whole model in shards."""
    name = config.schedule.name
    return name in schedules.KNOWN and schedules.KNOWN[name].sharded


def shards_of(config: RunConfig) -> int:
    """Processes that a parameter is sharded over, in a run that `is_sharded`."""
    processes = config.parallel.stages * config.parallel.data
    return processes // config.schedule.replicas if config.schedule.name == "hsdp" else processes


DERIVED_FROM_STEPS = 3
"""Steps of the program that the facts of a user's own schedule are derived from."""


def pauses_exactly(config: RunConfig, *, step: int) -> bool:
    """Whether a run that pauses after `step` computes the same numbers as one that does not.

    It does where it drains anyway and, if all stages update together, everywhere.
    """
    intervals = (config.train.eval_interval, config.train.checkpoint_interval)
    drains = any(interval and step % interval == 0 for interval in intervals)
    return drains or step >= config.train.steps or schedule_facts(config).updates_together


def segment_program(config: RunConfig, *, first_step: int, steps: int) -> schedules.Program:
    """The program of steps `first_step .. first_step + steps - 1` of a run.

    Raises:
        schedules.ScheduleError: the schedule cannot be built with these numbers.
    """
    return _build(**program_options(config, first_step=first_step, steps=steps))


def program_options(config: RunConfig, *, first_step: int, steps: int) -> dict[str, Any]:
    """The arguments of `schedules.build` for these steps: all that the program depends on."""
    schedule = config.schedule
    common = {
        "stages": config.parallel.stages,
        "microbatches": schedule.microbatches,
        "steps": steps,
        "first_step": first_step,
        "shard_head": config.parallel.shard_head,
        "tied": has_tied_shards(config),
    }
    if first_step < sync_steps(config):
        custom = schedules.is_custom(schedule.name)
        synchronous = SYNCHRONOUS if custom else schedules.find(schedule.name).synchronous_start
        return {"name": synchronous, **common}
    return {
        "name": schedule.name,
        **common,
        "delayed_from": sync_steps(config),
        **schedule_options(config),
    }


def schedule_options(config: RunConfig) -> dict[str, Any]:
    """The options of the run's schedule as `schedules.build` takes them, without those that are null and
    without what a run ignores.

    Raises:
        schedules.ScheduleError: there is no such schedule.
    """
    taken = schedules.options_taken(config.schedule.name)
    options = {
        name: getattr(config.schedule, name)
        for name, option in schedules.OPTIONS.items()
        if name in taken or not option.shared
    }
    if "update_interval" not in taken and options["update_interval"] == config.schedule.microbatches:
        # As the schedule has it; a program for planning may have fewer micro-batches.
        del options["update_interval"]
    return {name: value for name, value in options.items() if value is not None}


def update_interval(config: RunConfig) -> int:
    """Micro-batches between two updates of a stage; of a user's schedule as its option says."""
    asked, microbatches = schedule_options(config).get("update_interval"), config.schedule.microbatches
    schedule = schedules.KNOWN.get(config.schedule.name)
    default = schedule.default_interval if schedule else None
    return int(asked or (default(microbatches) if default else microbatches))


def has_tied_shards(config: RunConfig) -> bool:
    """Whether shards of the head are shards of the embedding, too."""
    return config.parallel.shard_head and config.model.tied


_build = lru_cache(maxsize=2)(schedules.build)


def sync_steps(config: RunConfig) -> int:
    """Steps at the start of the run that are synchronous whatever its schedule (`sync-start`)."""
    correction = CORRECTIONS.get(config.correction.name)
    if correction is None or not correction.synchronous_start:
        return 0
    settings = check_correction(correction.name, correction_options(config.correction))
    return min(int(settings[correction.synchronous_start]), config.train.steps)
