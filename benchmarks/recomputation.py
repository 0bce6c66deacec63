"""Time and memory of blocks under the three values of `train.recompute`, side by side.

    python benchmarks/recomputation.py --out benchmarks/results

A stage of two blocks runs forward and backward, the three in turn, round after round. Seconds are those of
the processor that this process used, so that other work on the machine counts little. Activations are what
autograd saves of a micro-batch, beside what the planner says.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from dated import write_dated
from torch.autograd.graph import saved_tensors_hooks

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.layouts import RECOMPUTE, layout
from stages.config import RunConfig
from stages.memory.estimate import microbatch_activations
from stages.memory.storages import SavedTensors, bytes_of, pointers_of, same
from stages.model.block_runner import block_runner
from stages.model.decoder import Stage
from stages.model.partition import StageCut
from stages.model.selective import watched_by
from stages.pipeline.build import dtypes
from stages.pipeline.weight_versions import WeightVersions

CUT = StageCut(blocks=range(2), has_embedding=False, has_head=False)


def config_of(options: argparse.Namespace, recompute: str) -> RunConfig:
    changes = [f"data.context={options.context}", f"train.precision={options.precision}"]
    base = base_of(options.model, changes).config
    return layout(base, "1f1b", stages=1, data=1, microbatches=1, size=1, recompute=recompute)


def stage_of(config: RunConfig) -> Stage:
    weights = WeightVersions(
        config.model,
        CUT,
        context=config.data.context,
        seed=0,
        replicas=1,
        gradient_buffers=1,
        master_dtype=dtypes(config).master,
        replica_dtype=dtypes(config).replica,
        device=torch.device("cpu"),
    )
    return weights.replicas[0].module


def activations(module: Stage, x: torch.Tensor) -> int:
    """Bytes that a micro-batch keeps."""
    saved = SavedTensors()
    with saved_tensors_hooks(saved.keep, same), watched_by(saved):
        output = module(x)
    assert module.rotation is not None
    size = bytes_of(saved.kept, without=pointers_of([*module.parameters(), module.rotation]))
    output.sum().backward()
    return size


def seconds(module: Stage, x: torch.Tensor) -> float:
    """Processor time of a forward and a backward."""
    started = time.process_time()
    module(x).backward(torch.ones_like(x))
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="135m")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for a dated Markdown table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    configs = {recompute: config_of(options, recompute) for recompute in RECOMPUTE}
    config = configs["none"]
    module = stage_of(config)
    shape = (1, options.context, config.model.width)
    x = torch.randn(shape, dtype=dtypes(config).replica).requires_grad_()
    runs = {
        recompute: block_runner(config.model, recompute=recompute, compiled=False) for recompute in RECOMPUTE
    }
    held: dict[str, int] = {}
    times: dict[str, list[float]] = {recompute: [] for recompute in RECOMPUTE}
    for recompute, run in runs.items():
        module.run_block = run
        held[recompute] = activations(module, x)
    for _ in range(options.rounds):
        for recompute, run in runs.items():
            module.run_block = run
            times[recompute].append(seconds(module, x))
    medians = {recompute: statistics.median(values) for recompute, values in times.items()}
    lines = [
        f"Two blocks of {options.model}, one micro-batch of {options.context} tokens, {options.precision}, "
        f"one thread, not compiled; median of {options.rounds} rounds; torch {torch.__version__}, "
        f"Python {platform.python_version()}.",
        "",
        "| train.recompute | kept bytes | planned | of none's | processor s | of none's |",
        "|---|---|---|---|---|---|",
    ]
    for recompute in RECOMPUTE:
        planned, _ = microbatch_activations(configs[recompute], CUT)
        lines.append(
            f"| {recompute} | {held[recompute]:,} | {planned:,} | {held[recompute] / held['none']:.3f} "
            f"| {medians[recompute]:.3f} | {medians[recompute] / medians['none']:.3f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        write_dated(options.out, "recomputation", f"# Recomputation: none, selective, full\n\n{text}")


if __name__ == "__main__":
    main()
