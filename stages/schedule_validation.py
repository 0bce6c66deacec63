"""Validates the schedule of a configuration, and what depends on it. Imports no torch."""

from __future__ import annotations

import schedules
from optimizers import method_named
from schedules.catalogue import least_lead
from schedules.options import checked
from stages.config.limits import ConfigError
from stages.config.run_config import ModelConfig, RunConfig
from stages.config.segments import (
    has_tied_shards,
    schedule_facts,
    schedule_options,
    segment_program,
    sync_steps,
)
from stages.shape.head import has_terms
from stages.weights.gradient_buffers import gradient_buffers

MOST_SLOTS = 100_000
"""Upper bound of stages times micro-batches in a step, the size of a step's program."""

CUSTOM_STEPS = 3
"""Steps in each of the two segments that a custom schedule is checked with."""


def check_schedule(config: RunConfig) -> None:
    """Check the keys of `schedule`, and those that depend on it.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted; for a custom schedule it
            lists every problem, one per line.
    """
    name = config.schedule.name
    if schedules.is_custom(name):
        _check_size(config, config.parallel.stages)
        _check_custom_schedule(config)
    else:
        _check_size(config, schedule_facts(config).stages)
        _check_delay(config)
    try:
        segment_program(config, first_step=0, steps=1)
    except schedules.ScheduleError as error:
        raise ConfigError("schedule", str(error)) from None
    facts = schedule_facts(config)
    stages = facts.stages
    if stages > config.model.layers:
        raise ConfigError(
            "parallel.stages",
            f"{stages} stages are asked for; the model {config.model.name} has {config.model.layers} blocks, "
            "and every stage needs one",
        )
    if config.parallel.cut is not None:
        _check_cut(config.parallel.cut, config.model, stages=stages)
    if config.error_feedback.coefficient != 0 and facts.synchronous:
        raise ConfigError(
            "error_feedback", f"corrects for delay, and the schedule {name} has none; accepted with it: false"
        )
    if config.train.clip == "global" and not facts.updates_together:
        raise ConfigError(
            "train.clip",
            f"global needs a step that all stages share, and under {name} each stage updates on its own; "
            "accepted with it: stage, none",
        )
    if config.parallel.shard_head:
        check_shard_head(config)
    if config.parallel.shard_gradients:
        _check_shard_gradients(config)
    if config.model.tied and not config.parallel.shard_head:
        for first_step in {0, sync_steps(config)}:
            problem = tied_problem(segment_program(config, first_step=first_step, steps=TIED_STEPS))
            if problem is not None:
                accepted = f"false, parallel.stages: 1, or a schedule in a V ({', '.join(can_tie())})"
                raise ConfigError("model.tied", f"{problem}; accepted: {accepted}")


def _check_cut(cut: list[float], model: ModelConfig, *, stages: int) -> None:
    smallest = 0.5 if model.factory is None else 1
    sizes = "whole or with .5" if model.factory is None else "whole, since model.factory makes whole blocks"
    is_possible = all(size >= smallest and size % smallest == 0 for size in cut[:-1])
    is_possible &= cut[-1] >= 0 and cut[-1] % smallest == 0
    if len(cut) != stages or sum(cut) != model.layers or not is_possible:
        raise ConfigError(
            "parallel.cut",
            f"is {cut}; accepted: the blocks of {stages} stages, {sizes}, {model.layers} in all and at least "
            f"{smallest} each, but for the last, which may be 0: the head alone",
        )


def check_shard_head(config: RunConfig) -> None:
    """Check `parallel.shard_head` against the run's other settings.

    Raises:
        ConfigError: it is not accepted with one of them.
    """
    key, model = "parallel.shard_head", config.model
    if model.factory is not None:
        raise ConfigError(
            key,
            "needs a head that the program knows, and model.factory makes its own; accepted with it: false",
        )
    if model.vocab_size < config.parallel.stages:
        raise ConfigError(
            key,
            f"gives each rank some of the {model.vocab_size} tokens of model.vocab_size, and there are "
            f"{config.parallel.stages} ranks; accepted with it: false",
        )
    if has_terms(model):
        raise ConfigError(
            key,
            "computes the plain cross-entropy, without model.logit_softcap and model.z_loss; accepted with "
            "them: false",
        )
    if config.train.clip == "stage":
        raise ConfigError(
            key, "makes stages of the head's shards, and train.clip is stage; accepted with it: false"
        )
    if not method_named(config.optimizer.name).rule("embedding" if model.tied else "head").elementwise:
        raise ConfigError(
            key,
            f"needs an optimizer that updates rows of the head alone, unlike {config.optimizer.name}; "
            "accepted with it: false",
        )


def _check_shard_gradients(config: RunConfig) -> None:
    key, data = "parallel.shard_gradients", config.parallel.data
    if data == 1:
        raise ConfigError(key, "shards over data ranks, and parallel.data is 1; accepted with it: false")
    if has_tied_shards(config) and not schedule_facts(config).synchronous:
        raise ConfigError(
            key,
            "keeps one whole gradient, and shards that embedding and head share (model.tied, "
            "parallel.shard_head) gather those of two steps at once; accepted with them: false",
        )
    steps = 2 + config.schedule.delay
    program = segment_program(config, first_step=sync_steps(config), steps=steps)
    if max(gradient_buffers([program], data_ranks=data, on_gpu=False)) == 1:
        raise ConfigError(
            key,
            f"shards the second gradient buffer, and {config.schedule.name} has one: its backwards never run "
            "beside an update; accepted with it: false",
        )


TIED_STEPS = 3
"""Steps of the program in which the order of the ends' updates is checked."""


def can_tie() -> list[str]:
    """The schedules whose first and last stage can share a matrix."""
    return [name for name, schedule in schedules.FAMILY.items() if schedule.ends_together]


def tied_problem(program: schedules.Program) -> str | None:
    """Why embedding and head cannot share a matrix under a program; None: they can.

    One rank has to hold both, and on it the stages' updates alternate, the head's first: its gradient is then
    added to what the embedding has gathered of the same step. At least one of the embedding's backwards comes
    between the two, since a reduction that begins within the last of them needs the head's gradient.
    """
    last = program.num_stages - 1
    if last == 0:
        return None
    rank, other = program.rank_of_stage[0], program.rank_of_stage[last]
    if rank != other:
        return f"needs embedding and head on one rank, and {program.schedule} has them on {rank} and {other}"
    if not program.updates_together:
        return f"needs stages that update together, and under {program.schedule} each updates on its own"
    head = embedding = program.first_step
    followed = False
    for action in program.actions[rank]:
        in_turn = True
        if action.op is schedules.Op.UPDATE and action.stage == last:
            in_turn, head, followed = head == embedding, action.version, False
        elif action.op is schedules.Op.UPDATE and action.stage == 0:
            in_turn, embedding = followed and action.version == head, action.version
        elif action.stage == 0 and action.op is not schedules.Op.FORWARD:
            followed = True
        if not in_turn:
            return f"needs the last stage to update before the first ends its step, unlike {program.schedule}"
    return None


def _check_size(config: RunConfig, stages: int) -> None:
    microbatches = config.schedule.microbatches
    if (slots := stages * microbatches) > MOST_SLOTS:
        raise ConfigError(
            "schedule.microbatches",
            f"{microbatches} micro-batches on {stages} stages make a program of {slots:,} parts per step; "
            f"accepted: {MOST_SLOTS:,}",
        )


def _check_custom_schedule(config: RunConfig) -> None:
    """Build the programs of two consecutive segments and report every problem, one per line."""
    first_step = sync_steps(config)
    try:
        first, second = (
            segment_program(config, first_step=first_step + CUSTOM_STEPS * number, steps=CUSTOM_STEPS)
            for number in range(2)
        )
    except schedules.ScheduleError as error:
        raise ConfigError("schedule.name", str(error)) from None
    problems = []
    if first.rank_of_stage != second.rank_of_stage:
        problems.append(f"places stages on ranks {first.rank_of_stage}, then on {second.rank_of_stage}")
    if len(first.initial_versions) > 1:
        problems.append(
            f"begins at step {first_step} with versions {list(first.initial_versions)}, but only the newest "
            "is there (after a synchronous start, see the option delayed_from)"
        )
    if first.final_versions != second.initial_versions:
        problems.append(
            f"a segment ends with versions {list(first.final_versions)}, and the next begins with "
            f"{list(second.initial_versions)}"
        )
    if (first.updates_together, first.update_interval) != (second.updates_together, second.update_interval):
        problems.append("updates in another way in its second segment")
    if first_step and first.rank_of_stage != tuple(range(config.parallel.stages)):
        problems.append("sync-start needs one stage a rank, in order")
    if problems:
        raise ConfigError(
            "schedule.name", "\n".join(f"{config.schedule.name}: {problem}" for problem in problems)
        )


def _check_delay(config: RunConfig) -> None:
    schedule, stages = config.schedule, config.parallel.stages
    microbatches, delay, ahead = schedule.microbatches, schedule.delay, schedule.ahead
    if schedules.find(schedule.name).lead is None:
        return
    options = schedule_options(config)
    for name, value in options.items():
        try:
            checked({name: value})
        except schedules.ScheduleError as error:
            raise ConfigError(f"schedule.{name}", str(error)) from None
    shards = config.parallel.shard_head
    least = least_lead(schedule.name, stages=stages, shard_head=shards, **options)
    assert least is not None
    if delay * microbatches < least:
        needed, smallest = -(-least // delay), -(-least // microbatches)
        further = "" if ahead == 1 else f" and schedule.ahead = {ahead}"
        further += " and parallel.shard_head" * shards
        raise ConfigError(
            "schedule.microbatches",
            f"is {microbatches}; {schedule.name} with {stages} stages needs at least {needed} micro-batches "
            f"per step for schedule.delay = {delay}{further} (with {microbatches}, the smallest "
            f"delay is {smallest})",
        )
