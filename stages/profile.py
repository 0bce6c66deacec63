"""Measures the seconds of a model's parts on this machine: embedding, block, head, and optimizer step."""

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

from stages.config.run_config import RunConfig
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.model.compiler import compiles_here
from stages.model.decoder import Stage
from stages.model.gradients.split_backward import DeferredGradients, deferring
from stages.model.runner import block_runner
from stages.shape.partition import StageCut
from stages.update.optimizer_step import StageUpdate, squared_norm
from stages.weights.number_formats import dtypes
from stages.weights.tied_head import TiedHead
from stages.weights.weight_versions import WeightVersions

BLOCKS = 2
"""Blocks measured together; a block's cost is its share."""
PARTS = {
    "embedding": StageCut(halves=range(0), has_embedding=True, has_head=False),
    "block": StageCut(halves=range(2 * BLOCKS), has_embedding=False, has_head=False),
    "dense_block": StageCut(halves=range(2 * BLOCKS), has_embedding=False, has_head=False),
    "head": StageCut(halves=range(0), has_embedding=False, has_head=True),
}
"""`dense_block`: only in a mixture of experts whose first blocks are dense; `block` then has experts."""
WARM_UP = 2


def measure(
    config: RunConfig,
    *,
    device: torch.device,
    microbatch_sizes: Sequence[int],
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Median seconds of each part for several micro-batch sizes.

    Args:
        config: model, context, precision and optimizer.
        device: the device to measure.
        microbatch_sizes: sequences per micro-batch.
        repeats: measurements per median.
        progress: called with the name of each measurement.

    Returns:
        By part: `update` (its optimizer step), and by micro-batch size `forward`, `backward`, the halves
        of a split backward, `input_half` and `weight_half`, which together may take longer than `backward`,
        and `cheap`, what selective recomputation adds to the backward.
    """
    measured: dict[str, Any] = {}
    embedding: WeightVersions | None = None
    for name, cut in PARTS.items():
        if name == "dense_block" and not config.model.dense_layers:
            continue
        share = len(cut.blocks) or 1
        dense_layers = BLOCKS if name == "dense_block" else 0
        own = replace(config, model=replace(config.model, layers=BLOCKS, dense_layers=dense_layers))
        weights = WeightVersions(
            own,
            cut,
            replicas=1,
            gradient_buffers=1,
            device=device,
        )
        if config.model.tied and cut.has_embedding:
            embedding = weights
        elif config.model.tied and cut.has_head:
            assert embedding is not None  # the first of PARTS
            TiedHead(weights, embedding=embedding)
        part: dict[str, Any] = {"microbatch": {}}
        for size in microbatch_sizes:
            progress(f"{name}, {size} sequences")
            sized = replace(own, train=replace(config.train, microbatch_size=size))
            times = _microbatch(weights.replicas[0].module, sized, device=device, repeats=repeats)
            part["microbatch"][str(size)] = {key: seconds / share for key, seconds in times.items()}
        progress(f"{name}, update")
        part["update"] = _update(own, weights, device=device, repeats=repeats) / share
        measured[name] = part
    return measured


def _microbatch(module: Stage, config: RunConfig, *, device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds of a micro-batch's forward, backward, and the halves of a split backward through `module`."""
    shape = (config.train.microbatch_size, config.data.context)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    dtype = dtypes(config).replica
    inputs = tokens
    if module.embedding is None:
        activation = torch.randn((*shape, config.model.width), generator=generator)
        inputs = activation.to(device=device, dtype=dtype).requires_grad_()
    documents = None
    if config.data.document_mask and module.blocks:
        documents = Batches(config, prepare(config.data), device=device).documents(0)
    gradient = torch.randn((*shape, config.model.width), generator=generator).to(device=device, dtype=dtype)

    def forward() -> Tensor:
        output: Tensor = module(inputs, targets=None if module.head is None else tokens, documents=documents)
        return output

    output_gradient = None if module.head is not None else gradient
    compiled = compiles_here(config, device=device.type)

    def median_times(*, split: bool, recompute: str = "none") -> tuple[float, float, float]:
        """Seconds of the forward, of the backward or its input half, and of the weight half."""
        module.run_block = block_runner(config.model, recompute=recompute, compiled=compiled)
        times = []
        waiting: tuple[Tensor, DeferredGradients | None] | None = None
        for _ in range(1 + WARM_UP + repeats):
            deferred = DeferredGradients() if split else None
            with deferring(deferred):
                output, first = _timed(forward, device)
            if waiting is not None:
                # As in a pipeline, the next micro-batch's forward runs before this one's backward, so less of
                # its memory is in the cache.
                ready, weight_half = waiting
                _, second = _timed(partial(ready.backward, output_gradient), device)
                _, third = _timed(weight_half.compute if weight_half is not None else lambda: None, device)
                times.append((first, second, third))
            waiting = output, deferred
        medians = [statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)]
        return medians[0], medians[1], medians[2]

    forwards, backwards, _ = median_times(split=False)
    if module.embedding is not None:  # its backward defers nothing
        first = second = backwards / 2
    else:
        _, first, second = median_times(split=True)
    cheap = median_times(split=False, recompute="selective")[1] - backwards if module.blocks else 0.0
    return {
        "forward": forwards,
        "backward": backwards,
        "input_half": first,
        "weight_half": second,
        "cheap": max(0.0, cheap),  # less than the clock's noise where blocks are small
    }


def _update(config: RunConfig, weights: WeightVersions, *, device: torch.device, repeats: int) -> float:
    update = StageUpdate(config, weights, stage=0, delays=[0], mismatch=0)
    times = []
    for step in range(WARM_UP + repeats):
        buffer = weights.take_gradient()
        buffer.flat.normal_()

        def apply(step: int = step) -> None:
            gradient = weights.gradient_buffer
            norm = float(squared_norm(gradient))
            update.apply(gradient, version=step + 1, step=0, clip_by=norm, finite=math.isfinite(norm))

        (_, seconds) = _timed(apply, device)
        times.append(seconds)
    return statistics.median(times[WARM_UP:])


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `work`, and the seconds until the device has completed it."""
    _synchronize(device)
    started = time.perf_counter()
    result = work()
    _synchronize(device)
    return result, time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
