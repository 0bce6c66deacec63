"""Enumerates the layouts of a run over GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.planner.balance import efficiency
from asyncpp_cli.planner.cuts import WORTH_A_CUT
from stages.config.limits import ConfigError
from stages.config.run_config import RunConfig, ScheduleConfig
from stages.config.segments import schedule_options
from stages.resolve.schedule import check_shard_head
from stages.shape.partition import cut_model

CONSIDERED = tuple(schedule.name for schedule in schedules.FAMILY.values() if schedule.planned)
"""Schedules considered by default."""
CHUNKS = (2, 4)
"""Stages per rank to try, where a schedule takes several (with one it is `1f1b`)."""
SHARDED_STAGES = 16
"""Most stages that shards of the head are considered for: their programs take long to build."""
FURTHER_AHEAD = 2
"""Value of `schedule.ahead` to try besides 1, where a schedule has it: running ahead hides messages."""
RECOMPUTE = ("none", "selective", "full")
"""Values of `train.recompute`, all of which are tried."""
LARGEST_MICROBATCH = 64
"""Sequences per micro-batch."""


class Variant(NamedTuple):
    """A schedule and its options."""

    name: str
    chunks: int = 1
    ahead: int = 1
    split: bool = False
    shard_head: bool = False


def layouts(
    base: RunConfig, *, gpus: int, tokens_per_step: int, names: Collection[str] = CONSIDERED
) -> Iterator[RunConfig]:
    """Every layout with `tokens_per_step` tokens per step on `gpus` GPUs, as a run's configuration.

    Layouts vary in schedule, its `chunks`, `ahead` and `split`, pipeline and data parallelism, number and
    size of micro-batches, and recomputation. Micro-batch sizes are powers of two that divide the sequences of
    a pipeline.

    Raises:
        UserError: there is no such layout.
    """
    empty = True
    for stages in range(1, min(gpus, base.model.layers) + 1):
        if gpus % stages:
            continue
        sequences, remainder = divmod(tokens_per_step, base.data.context * (gpus // stages))
        if remainder or not sequences:
            continue
        gains_by_shards = _gains_by_shards(base, stages=stages)
        for size in (2**power for power in range(LARGEST_MICROBATCH.bit_length())):
            if sequences % size:
                break
            counts = {"stages": stages, "data": gpus // stages, "microbatches": sequences // size}
            for variant, recompute in product(
                _variants(names, layers=base.model.layers, shard_head=gains_by_shards, **counts), RECOMPUTE
            ):
                empty = False
                yield layout(base, variant, size=size, recompute=recompute, **counts)
    if empty:
        raise UserError(
            f"--tokens-per-step {tokens_per_step}: no layout of {gpus} GPUs reads as many in sequences of "
            f"{base.data.context} tokens; accepted: multiples of {base.data.context * gpus} (with as many "
            f"pipelines as GPUs), or of fewer with more stages, up to {base.model.layers}"
        )


def _gains_by_shards(base: RunConfig, *, stages: int) -> bool:
    """Whether the run may have its head in shards, and no cut makes its stages as even."""
    if stages > SHARDED_STAGES:
        return False
    try:
        check_shard_head(replace(base, parallel=replace(base.parallel, stages=stages)))
    except ConfigError:
        return False
    if base.model.tied:
        # Without shards few schedules can have it, and these have both ends of the model on one rank.
        return True
    cuts = cut_model(base.model, stages=stages, context=base.data.context, within_blocks=True)
    return efficiency(base, cuts) < 1 - WORTH_A_CUT


def _variants(
    names: Collection[str],
    *,
    stages: int,
    data: int,
    layers: int,
    microbatches: int,
    shard_head: bool,
) -> Iterator[Variant]:
    """Chunks as `layers` blocks allow, and ahead as the smallest delay allows; `shard_head`: whether shards
    of the head are considered, too."""
    if stages == 1:
        yield from [Variant(name) for name in names if schedules.is_synchronous(name)][:1]
        # Without a pipeline a delay hides the all-reduce alone.
        yield from [Variant(name) for name in names if data > 1 and _delays_all_together(name)][:1]
        return
    for name in names:
        schedule = schedules.find(name)
        every_chunks = CHUNKS if "chunks" in schedule.options else (schedule.stages_per_rank,)
        for chunks in every_chunks:
            if stages * chunks > layers:
                continue
            for split in (False, True) if "split" in schedule.options else (False,):
                delays = [
                    schedules.smallest_delay(
                        name, stages=stages, microbatches=microbatches, ahead=ahead, split=split
                    )
                    for ahead in (1, FURTHER_AHEAD)
                ]
                aheads = [1]
                if "ahead" in schedule.options and delays[0] == delays[1]:
                    aheads.append(FURTHER_AHEAD)
                for ahead in aheads:
                    yield Variant(name, chunks, ahead, split)
                    if shard_head and schedule.can_shard_head:
                        yield Variant(name, chunks, ahead, split, shard_head=True)


def _delays_all_together(name: str) -> bool:
    """Whether all stages update together, late, and each rank holds one stage."""
    schedule = schedules.find(name)
    return not schedule.synchronous and schedule.updates_together and schedule.stages_per_rank == 1


def layout(
    base: RunConfig,
    variant: Variant,
    *,
    stages: int,
    data: int,
    microbatches: int,
    size: int,
    recompute: str,
) -> RunConfig:
    """`base` in this layout, with the settings that its schedule requires."""
    schedule = schedules.find(variant.name)
    own: dict[str, Any] = {"chunks": variant.chunks, "ahead": variant.ahead, "split": variant.split}
    options = {
        name: getattr(ScheduleConfig, name) for name, option in schedules.OPTIONS.items() if not option.shared
    } | own
    named = replace(base.schedule, name=variant.name, microbatches=microbatches, **options)
    delay = schedules.smallest_delay(
        variant.name,
        stages=stages,
        microbatches=microbatches,
        shard_head=variant.shard_head,
        **schedule_options(replace(base, schedule=named)),
    )
    clip = base.train.clip
    if clip == "global" and not schedule.updates_together:
        clip = "stage"
    return replace(
        base,
        schedule=replace(named, delay=delay),
        parallel=replace(base.parallel, stages=stages, data=data, cut=None, shard_head=variant.shard_head),
        train=replace(
            base.train,
            microbatch_size=size,
            recompute=recompute,
            clip=clip,
        ),
        error_feedback=replace(base.error_feedback, coefficient=0.0)
        if schedule.synchronous
        else base.error_feedback,
        correction=type(base.correction)() if schedule.synchronous else base.correction,
    )
