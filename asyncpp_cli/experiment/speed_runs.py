"""Runs for their speed alone (`speed_steps`): synchronous cells whose loss another cell gives, to the bit.

A synchronous gradient does not depend on which rank computes it, so layouts that add the micro-batches'
gradients in one order have the same losses and weights. One of them trains to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optimizers
import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.settings import identity
from schedules import Op
from stages.config.run_config import RunConfig
from stages.config.segments import is_sharded
from stages.resolve.facts import facts

_ADDING = (Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.HEAD_WEIGHT, Op.EMBED_WEIGHT)
"""Ops that add to the gradient of a stage's weights."""

_MOST_NAMED = 4
"""Keys that a refusal names."""


def loss_givers(configs: Sequence[RunConfig], *, steps: int, source: str) -> list[int | None]:
    """For each configuration the place of the one whose loss is its own, too; None: it trains to its end.

    The first synchronous schedule gives the loss; every other synchronous cell needs a cell of that schedule
    that differs in the layout alone.

    Args:
        configs: of the cells, in order.
        steps: of a run for its speed.
        source: of the template, for messages.

    Raises:
        UserError: a synchronous cell has other numbers than those of the first schedule, no cell would be
            shortened, or so few steps have no throughput.
    """
    synchronous = {place: _settings(config) for place, config in enumerate(configs) if _synchronous(config)}
    where = f"{source}: speed_steps"
    if not synchronous:
        raise UserError(f"{where}: no cell has a synchronous schedule")
    leading = configs[min(synchronous)].schedule.name
    giver_of: dict[frozenset[tuple[str, str]], int] = {}
    for place, settings in synchronous.items():
        if configs[place].schedule.name == leading:
            giver_of.setdefault(settings, place)
    givers: list[int | None] = [None] * len(configs)
    for place, settings in synchronous.items():
        config, giver = configs[place], giver_of.get(settings)
        name = config.schedule.name
        if giver is None:
            nearest = min((settings ^ other for other in giver_of), key=len)
            keys = sorted({key for key, _ in nearest})
            named = f"{', '.join(keys[:_MOST_NAMED])}{', ...' if len(keys) > _MOST_NAMED else ''}"
            raise UserError(
                f"{where}: a cell of {name} has no cell of {leading} with the same numbers; the nearest "
                f"differs in {named}"
            )
        if giver == place:
            continue
        if reason := _other_numbers(configs[giver], config):
            raise UserError(f"{where}: {name} has not the numbers of {leading} to the bit: {reason}")
        if steps >= config.train.steps:
            raise UserError(
                f"{where} is {steps}, and {name} has {config.train.steps} steps (train.steps) in all"
            )
        if min(config.train.eval_interval, config.train.checkpoint_interval or steps) < 2:
            raise UserError(
                f"{where}: with a drain after every step (train.eval_interval, train.checkpoint_interval) "
                "there is no throughput"
            )
        givers[place] = giver
    if not any(giver is not None for giver in givers):
        raise UserError(
            f"{where}: {leading} is the only synchronous layout, so no cell would run for its speed alone; "
            "accepted then: null"
        )
    return givers


def _synchronous(config: RunConfig) -> bool:
    try:
        return facts(config).schedule.synchronous
    except schedules.ScheduleError:
        return False  # `check_cells` reports it


def _settings(config: RunConfig) -> frozenset[tuple[str, str]]:
    """What the numbers depend on: all but the layout."""
    known: Mapping[str, Any] = identity(config)
    return frozenset(
        (key, repr(value))
        for key, value in known.items()
        if key == "schedule.microbatches" or not (key.startswith("schedule.") or key == "parallel.cut")
    )


def _other_numbers(giver: RunConfig, config: RunConfig) -> str | None:
    """Why two synchronous configurations that differ in the layout alone compute other bits; None: they do
    not. (A global norm is summed over stages in float64, so its last digit may differ.)

    Processes that share a step's micro-batches (`fsdp`) add gradients in another order: their loss is the
    same but for rounding.
    """
    if is_sharded(config) or is_sharded(giver):
        return None
    try:
        same_order = _orders(giver) == _orders(config)
    except schedules.ScheduleError:
        return None  # `check_cells` reports it
    if not same_order:
        return "it adds the gradients of a step's micro-batches in another order"
    if _cut(giver) != _cut(config):
        if config.train.clip == "stage":
            return "train.clip is stage, and their stages differ"
        for key, own in (
            ("optimizer.name", optimizers.is_custom(config.optimizer.name)),
            ("model.factory", config.model.factory is not None),
        ):
            if own:
                return f"their stages differ, and code of your own ({key}) may depend on them"
    return None


def _orders(config: RunConfig) -> set[tuple[tuple[int, bool], ...]]:
    """The orders in which stages add the gradients of a step's micro-batches.

    A tied matrix gathers those of its two uses: in shards as they come, else those of the head at once, at
    its stage's update.
    """
    program = facts(config).program(first_step=0, steps=1)
    orders = {
        tuple((each.microbatch, each.op is Op.EMBED_WEIGHT) for each in actions if each.op in _ADDING)
        for actions in program.actions_by_stage()
    }
    if config.model.tied and not program.tied_shards:
        # An embedding has no weight half. In one stage a whole backward adds both gradients at once.
        events = {(0, Op.BACKWARD), (0, Op.BACKWARD_INPUT), (program.loss_stage, Op.UPDATE)}
        events |= set() if program.loss_stage else {(0, Op.BACKWARD_WEIGHT)}
        of_rank = program.actions[program.rank_of_stage[0]]
        orders.add(tuple((each.microbatch, each.op is Op.UPDATE) for each in of_rank if each[:2] in events))
    return orders


def _cut(config: RunConfig) -> object:
    run = facts(config)
    return run.schedule.stages, run.schedule.placement, run.config.parallel.cut
