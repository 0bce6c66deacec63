"""Checks of a configuration's schedule and of what depends on it, and the facts of one that is accepted.
Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import schedules
from optimizers import method_named
from schedules.analyze import staleness
from schedules.catalogue import least_lead
from schedules.options import checked
from stages.config.limits import ConfigError
from stages.config.own_code import raised_in
from stages.config.run_config import ModelConfig, RunConfig
from stages.config.segments import has_tied_shards, is_sharded, schedule_options, segment_program, sync_steps
from stages.resolve.facts import Resolved, facts
from stages.shape.head import has_terms
from stages.weights.gradient_buffers import gradient_buffers

MOST_SLOTS = 100_000
"""Upper bound of stages times micro-batches in a step, the size of a step's program."""


CUSTOM_STEPS = 3
"""Steps in each of the two segments that a custom schedule is checked with."""


def resolve_schedule(config: RunConfig) -> Resolved:
    """The facts of a run whose `schedule` section, and what depends on it, is accepted.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted; for a custom schedule it
            lists every problem, one per line.
    """
    if schedules.is_custom(config.schedule.name):
        _check_size(config, config.parallel.stages)
        _check_custom_schedule(config)
    try:
        run = facts(config)
        _check_size(config, run.schedule.stages)
        _check_delay(config)
        for first_step in {0, run.sync_steps}:
            run.program(first_step=first_step, steps=1)
    except schedules.ScheduleError as error:
        key = "schedule.microbatches" if is_sharded(config) else "schedule"
        raise ConfigError(key, str(error)) from None
    if is_sharded(config):
        _check_sharded(config)
    else:
        _check_stages(run)
    _check_with_schedule(run)
    if config.parallel.shard_head:
        check_shard_head(config)
    if config.parallel.shard_gradients:
        _check_shard_gradients(run)
    if config.model.tied and not config.parallel.shard_head:
        _check_tied(run)
    return run


def _check_stages(run: Resolved) -> None:
    """Check that there is a block for every stage, and the cut if one is given."""
    config, stages = run.config, run.schedule.stages
    if stages > config.model.layers:
        raise ConfigError(
            "parallel.stages",
            f"{stages} stages are asked for; the model {config.model.name} has {config.model.layers} blocks, "
            "and every stage needs one",
        )
    if config.parallel.cut is not None:
        _check_cut(config.parallel.cut, config.model, stages=stages)


def _check_with_schedule(run: Resolved) -> None:
    """Check error feedback and clipping, which need a delay and a step that all stages share."""
    config, name = run.config, run.config.schedule.name
    if config.error_feedback.coefficient != 0 and run.schedule.synchronous:
        raise ConfigError(
            "error_feedback", f"corrects for delay, and the schedule {name} has none; accepted with it: false"
        )
    if config.train.clip == "global" and not run.schedule.updates_together:
        raise ConfigError(
            "train.clip",
            f"global needs a step that all stages share, and under {name} each stage updates on its own; "
            "accepted with it: stage, none",
        )


def _check_tied(run: Resolved) -> None:
    for first_step in {0, run.sync_steps}:
        problem = tied_problem(run.program(first_step=first_step, steps=TIED_STEPS))
        if problem is not None:
            accepted = f"false, parallel.stages: 1, or a schedule in a V ({', '.join(can_tie())})"
            raise ConfigError("model.tied", f"{problem}; accepted: {accepted}")


def _check_sharded(config: RunConfig) -> None:
    """Check what a schedule that shards the model cannot do, and its number of replicas."""
    if config.parallel.shard_head:
        raise ConfigError(
            "parallel.shard_head",
            f"gives each pipeline rank rows of the head, and under {config.schedule.name} there are none; "
            "accepted with it: false",
        )
    if config.train.cuda_graphs:
        raise ConfigError(
            "train.cuda_graphs",
            f"a graph has its weights in one place, and under {config.schedule.name} they are gathered anew; "
            "accepted with it: false",
        )
    processes = config.parallel.stages * config.parallel.data
    replicas = config.schedule.replicas
    if config.schedule.name == "hsdp" and (processes % replicas or processes == replicas):
        numbers = [number for number in range(2, processes // 2 + 1) if processes % number == 0]
        raise ConfigError(
            "schedule.replicas",
            f"is {replicas}, must divide the {processes} processes (parallel.stages x parallel.data) into "
            f"groups of two or more; accepted: {', '.join(map(str, numbers)) or 'none: choose fsdp'}",
        )


def _check_cut(cut: Sequence[float], model: ModelConfig, *, stages: int) -> None:
    smallest = 0.5 if model.factory is None else 1
    sizes = "whole or with .5" if model.factory is None else "whole, since model.factory makes whole blocks"
    is_possible = len(cut) == stages and sum(cut) == model.layers
    is_possible &= all(size >= smallest and size % smallest == 0 for size in cut[:-1])
    if not is_possible or cut[-1] < 0 or cut[-1] % smallest:
        raise ConfigError(
            "parallel.cut",
            f"is {list(cut)}; accepted: the blocks of {stages} stages, {sizes}, {model.layers} in all and at "
            f"least {smallest} each, but for the last, which may be 0: the head alone",
        )


def check_shard_head(config: RunConfig) -> None:
    """Check `parallel.shard_head` against the run's other settings.

    Raises:
        ConfigError: it is not accepted with one of them.
    """
    model, ranks = config.model, config.parallel.stages
    rule = method_named(config.optimizer.name).rule("embedding" if model.tied else "head")
    refused = {
        "needs a head that the program knows, and model.factory makes its own; accepted with it: false": (
            model.factory is not None
        ),
        f"gives each rank some of the {model.vocab_size} tokens of model.vocab_size, and there are {ranks} "
        "ranks; accepted with it: false": model.vocab_size < ranks,
        "computes the plain cross-entropy, without model.logit_softcap and model.z_loss; accepted with them: "
        "false": has_terms(model),
        "makes stages of the head's shards, and train.clip is stage; accepted with it: false": (
            config.train.clip == "stage"
        ),
        f"needs an optimizer that updates rows of the head alone, unlike {config.optimizer.name}; accepted "
        "with it: false": not rule.elementwise,
    }
    for why, is_so in refused.items():
        if is_so:
            raise ConfigError("parallel.shard_head", why)


def _check_shard_gradients(run: Resolved) -> None:
    config = run.config
    key, data = "parallel.shard_gradients", config.parallel.data
    if data == 1:
        raise ConfigError(key, "shards over data ranks, and parallel.data is 1; accepted with it: false")
    if has_tied_shards(config) and not run.schedule.synchronous:
        raise ConfigError(
            key,
            "keeps one whole gradient, and shards that embedding and head share (model.tied, "
            "parallel.shard_head) gather those of two steps at once; accepted with them: false",
        )
    steps = 2 + config.schedule.delay
    program = run.program(first_step=run.sync_steps, steps=steps)
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
        raise ConfigError("schedule.name", f"{error}{raised_in(error, config)[1]}") from None
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
    of_first = staleness(first)
    if any(
        versions > 1 and mismatch
        for versions, mismatch in zip(of_first.versions, of_first.mismatch_max, strict=True)
    ):
        problems.append(
            "has backwards at newer weights than their forwards', and keeps older versions beside these; "
            "accepted: backwards at the version of their forward, or one version"
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
    if schedules.is_custom(schedule.name) or schedules.find(schedule.name).lead is None:
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
