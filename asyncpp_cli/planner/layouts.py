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
LARGEST_MICROBATCH = 64
"""Sequences."""


def layouts(
    base: RunConfig, *, gpus: int, tokens_per_step: int, names: Collection[str] = CONSIDERED
) -> Iterator[RunConfig]:
    """Every (schedule, p, data parallelism, micro-batches, micro-batch size, recomputation) that reads
    `tokens_per_step` tokens a step on `gpus` GPUs, as a run; of `interleaved-1f1b` with several chunks.

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
            for name, chunks in _with_chunks(names, stages=stages, layers=base.model.layers):
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
                    )
    if not found:
        raise UserError(
            f"--tokens-per-step {tokens_per_step}: no layout of {gpus} GPUs reads as many in sequences of "
            f"{base.data.context} tokens; accepted: multiples of {base.data.context * gpus} (with as many "
            f"pipelines as GPUs), or of fewer with more stages, up to {base.model.layers}"
        )


def _with_chunks(names: Collection[str], *, stages: int, layers: int) -> Iterator[tuple[str, int]]:
    """Schedules for so many ranks, each with the numbers of stages a rank that `layers` blocks allow."""
    if stages == 1:
        yield from [(name, 1) for name in names if schedules.is_synchronous(name)][:1]
        return
    for name in names:
        takes = schedules.find(name).takes_chunks
        yield from ((name, chunks) for chunks in (CHUNKS if takes else (1,)) if stages * chunks <= layers)


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
) -> RunConfig:
    """`base` laid out so, with what its schedule demands."""
    config = copy_of(base)
    schedule = schedules.find(name)
    config.schedule = replace(
        base.schedule,
        name=name,
        microbatches=microbatches,
        chunks=chunks,
        delay=schedules.smallest_delay(stages=stages, microbatches=microbatches),
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
