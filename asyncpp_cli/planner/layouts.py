"""The ways to lay a run out over GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import schedules
from asyncpp_cli.errors import UserError
from asyncpp_cli.settings import copy_of
from stages.config import RunConfig

CONSIDERED = ("1f1b", "interleaved-1f1b", "zero-bubble", "2bw", "pipedream", "paci")
"""Schedules that are enumerated unless told otherwise. `gpipe` takes as long as `1f1b` and more memory;
`pipedream-unstashed` is `paci` with an update after every backward."""
CHUNKS = (2, 4)
"""Stages a rank that are tried, where a schedule takes several; with one it is `1f1b`."""
FURTHER_AHEAD = 2
"""Forwards ahead for each stage that are tried besides 1, where a schedule can: they hide messages."""
LARGEST_MICROBATCH = 64
"""Sequences."""


def layouts(
    base: RunConfig, *, gpus: int, tokens_per_step: int, names: Collection[str] = CONSIDERED
) -> Iterator[RunConfig]:
    """Every (schedule, p, data parallelism, micro-batches, micro-batch size, recomputation) that reads
    `tokens_per_step` tokens a step on `gpus` GPUs, as a run; of `interleaved-1f1b` with several chunks, and
    of `2bw` also further ahead.

    Micro-batch sizes are powers of two, as far as they divide what a pipeline reads.

    Raises:
        UserError: there is none.
    """
    found = False
    for stages in range(1, min(gpus, base.model.layers) + 1):
        if gpus % stages:
            continue
        sequences, rest = divmod(tokens_per_step, base.data.context * (gpus // stages))
        if rest or not sequences:
            continue
        for size in (2**power for power in range(LARGEST_MICROBATCH.bit_length())):
            if sequences % size:
                break
            variants = _variants(
                names, stages=stages, layers=base.model.layers, microbatches=sequences // size
            )
            for name, chunks, ahead in variants:
                for recompute in (False, True):
                    found = True
                    yield layout(
                        base,
                        name,
                        stages=stages,
                        data=gpus // stages,
                        microbatches=sequences // size,
                        size=size,
                        recompute=recompute,
                        chunks=chunks,
                        ahead=ahead,
                    )
    if not found:
        raise UserError(
            f"--tokens-per-step {tokens_per_step}: no layout of {gpus} GPUs reads as many in sequences of "
            f"{base.data.context} tokens; accepted: multiples of {base.data.context * gpus} (with as many "
            f"pipelines as GPUs), or of fewer with more stages, up to {base.model.layers}"
        )


def _variants(
    names: Collection[str], *, stages: int, layers: int, microbatches: int
) -> Iterator[tuple[str, int, int]]:
    """Schedules for so many ranks, each with the numbers of stages a rank that `layers` blocks allow, and how
    far ahead it may run without more delay."""
    if stages == 1:
        yield from [(name, 1, 1) for name in names if schedules.is_synchronous(name)][:1]
        return
    least = schedules.smallest_delay(stages=stages, microbatches=microbatches)
    for name in names:
        schedule = schedules.find(name)
        for chunks in CHUNKS if schedule.takes_chunks else (1,):
            if stages * chunks <= layers:
                yield name, chunks, 1
        if schedule.takes_ahead and least == schedules.smallest_delay(
            stages=stages, microbatches=microbatches, ahead=FURTHER_AHEAD
        ):
            yield name, 1, FURTHER_AHEAD


def layout(
    base: RunConfig,
    name: str,
    *,
    stages: int,
    data: int,
    microbatches: int,
    size: int,
    recompute: bool,
    chunks: int = 1,
    ahead: int = 1,
) -> RunConfig:
    """`base` laid out so, with what its schedule demands."""
    config = copy_of(base)
    schedule = schedules.find(name)
    config.schedule = replace(
        base.schedule,
        name=name,
        microbatches=microbatches,
        chunks=chunks,
        ahead=ahead,
        delay=schedules.smallest_delay(stages=stages, microbatches=microbatches, ahead=ahead),
        update_interval=None,
    )
    config.parallel = replace(base.parallel, stages=stages, data=data, cut=None)
    config.train = replace(
        base.train,
        microbatch_size=size,
        recompute=recompute,
        clip="stage"
        if schedule.default_interval is not None and base.train.clip == "global"
        else base.train.clip,
    )
    if schedule.synchronous:
        config.error_feedback = replace(base.error_feedback, coefficient=0.0)
        config.correction = type(base.correction)()
    return config
