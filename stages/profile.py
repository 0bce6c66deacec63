"""What the parts of a model cost on the hardware at hand: embedding, block, head, and the optimizer step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.assemble import dtypes
from stages.blocks import block_runner
from stages.config import RunConfig
from stages.model import Stage, next_token_loss
from stages.partition import StageCut
from stages.split_backward import DeferredGradients, deferring
from stages.update import StageUpdate, squared_norm
from stages.weights import WeightVersions

BLOCKS = 2
"""Blocks that are measured together; a block costs its share of them."""
PARTS = {
    "embedding": StageCut(blocks=range(0), has_embedding=True, has_head=False),
    "block": StageCut(blocks=range(BLOCKS), has_embedding=False, has_head=False),
    "head": StageCut(blocks=range(0), has_embedding=False, has_head=True),
}
WARM_UP = 2


def measure(
    config: RunConfig,
    *,
    device: torch.device,
    microbatch_sizes: Sequence[int],
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds of each part, the median over `repeats`, for micro-batches of several sizes.

    Args:
        config: of the model, its context, precision and optimizer.
        device: that is measured.
        microbatch_sizes: sequences in a micro-batch.
        repeats: measurements of each.
        progress: told what is being measured.

    Returns:
        By part: `update` (its optimizer step), and by micro-batch size `forward`, `backward`, and the halves
        of a split backward, `input_half` and `weight_half`: together they may take longer than the whole.
    """
    measured: dict[str, Any] = {}
    for name, cut in PARTS.items():
        share = BLOCKS if name == "block" else 1
        weights = WeightVersions(
            config.model,
            cut,
            context=config.data.context,
            seed=0,
            replicas=1,
            gradient_buffers=1,
            master_dtype=dtypes(config).master,
            replica_dtype=dtypes(config).replica,
            device=device,
        )
        weights.replicas[0].module.run_block = block_runner(
            config.model, recompute=False, compiled=config.train.compile
        )
        part: dict[str, Any] = {"microbatch": {}}
        for size in microbatch_sizes:
            progress(f"{name}, {size} sequences")
            of_size = replace(config, train=replace(config.train, microbatch_size=size))
            times = _microbatch(weights.replicas[0].module, of_size, device=device, repeats=repeats)
            part["microbatch"][str(size)] = {key: seconds / share for key, seconds in times.items()}
        progress(f"{name}, update")
        part["update"] = _update(config, weights, device=device, repeats=repeats) / share
        measured[name] = part
    return measured


def _microbatch(module: Stage, config: RunConfig, *, device: torch.device, repeats: int) -> dict[str, float]:
    """A micro-batch's forward, its backward, and the halves of a split one, through what `module` holds."""
    shape = (config.train.microbatch_size, config.data.context)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    dtype = dtypes(config).replica
    given = tokens
    if module.embedding is None:
        activation = torch.randn((*shape, config.model.width), generator=generator)
        given = activation.to(device=device, dtype=dtype).requires_grad_()
    gradient = torch.randn((*shape, config.model.width), generator=generator).to(device=device, dtype=dtype)

    def forward() -> Tensor:
        output: Tensor = module(given)
        return output if module.head is None else next_token_loss(output, tokens)

    sent = None if module.head is not None else gradient

    def median_times(*, split: bool) -> tuple[float, float, float]:
        """Of the forward, the backward or its first half, and the second half."""
        times = []
        waiting: tuple[Tensor, DeferredGradients | None] | None = None
        for _ in range(1 + WARM_UP + repeats):
            deferred = DeferredGradients() if split else None
            with deferring(deferred):
                output, first = _clocked(forward, device)
            if waiting is not None:
                # As in a pipeline, the next micro-batch's forward comes before this one's backward: with the
                # memory of two, less of it is in the processor's cache.
                ready, put_off = waiting
                _, second = _clocked(partial(ready.backward, sent), device)
                _, third = _clocked(put_off.compute if put_off is not None else lambda: None, device)
                times.append((first, second, third))
            waiting = output, deferred
        medians = [statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)]
        return medians[0], medians[1], medians[2]

    forwards, backwards, _ = median_times(split=False)
    if module.embedding is not None or config.train.compile:
        # A look-up has nothing to put off, and a compiled block's backward is one piece.
        first = second = backwards / 2
    else:
        _, first, second = median_times(split=True)
    return {"forward": forwards, "backward": backwards, "input_half": first, "weight_half": second}


def _update(config: RunConfig, weights: WeightVersions, *, device: torch.device, repeats: int) -> float:
    update = StageUpdate(config, weights, stage=0, delays=[0], mismatch=0)
    times = []
    for step in range(WARM_UP + repeats):
        buffer = weights.take_gradient()
        buffer.flat.normal_()

        def apply(step: int = step) -> None:
            gradient = weights.gathering
            norm = float(squared_norm(gradient))
            update.apply(gradient, version=step + 1, step=0, clip_by=norm, finite=math.isfinite(norm))

        (_, seconds) = _clocked(apply, device)
        times.append(seconds)
    return statistics.median(times[WARM_UP:])


def _clocked(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What `work` returns, and the seconds until the device had done it."""
    _wait_for(device)
    started = time.perf_counter()
    result = work()
    _wait_for(device)
    return result, time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
