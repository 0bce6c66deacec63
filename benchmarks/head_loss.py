"""The last stage with its loss of whole logits and in chunks: tokens per second, and peak memory.

    python benchmarks/head_loss.py --out benchmarks/results

A stage of one block and the head computes a forward and a backward. Both forms take turns on the same batch,
and the fastest round of each counts. Time is processor time on one thread, which other work on the machine
disturbs little. Peak memory is the growth of the process's resident set above the stage's weights and
gradients, each form in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dated import today, write_dated
from torch import Tensor

from stages.config import ModelConfig
from stages.model import head_chunks
from stages.model.decoder import Stage, initialise
from stages.model.head_chunks import LARGE_LOGITS, chunk_rows
from stages.model.partition import StageCut


@dataclass(frozen=True)
class Size:
    """A last stage and its micro-batch."""

    name: str
    width: int
    heads: int
    mlp_width: int
    vocabulary: int
    batch: int
    context: int


SIZES = (
    Size("quickstart", 128, 4, 384, 256, 8, 128),
    Size("135m", 576, 9, 1536, 49152, 1, 1024),
    Size("135m", 576, 9, 1536, 49152, 4, 1024),
    Size("width 256", 256, 4, 704, 32768, 4, 1024),
)
FORMS = {"whole": 2**62, "chunks": 0}
"""Bytes of logits from which on they are computed in chunks."""
LEAST_PEAK = 10**8
"""Bytes below which the growth is not told from that of starting."""


def stage_of(size: Size) -> tuple[Stage, Tensor, Tensor]:
    """The stage, its input, and its targets."""
    config = ModelConfig(
        name=size.name,
        layers=1,
        width=size.width,
        heads=size.heads,
        kv_heads=size.heads,
        mlp_width=size.mlp_width,
        vocab_size=size.vocabulary,
    )
    cut = StageCut(blocks=range(1), has_embedding=False, has_head=True)
    stage = Stage(config, cut, context=size.context)
    stage.prepare(device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in stage.named_parameters():
        initialise(parameter, name=name, seed=0, layers=1)
        parameter.grad = torch.zeros_like(parameter)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(size.batch, size.context, size.width, generator=generator).requires_grad_()
    return stage, given, torch.randint(size.vocabulary, (size.batch, size.context), generator=generator)


def micro_batch(stage: Stage, given: Tensor, targets: Tensor, form: str) -> float:
    """A forward and a backward; processor seconds."""
    head_chunks.LARGE_LOGITS = FORMS[form]
    started = time.process_time()
    stage(given, targets=targets).backward()
    return time.process_time() - started


def peak_bytes(arguments: tuple[Size, str]) -> int:
    """Growth of the resident set in a micro-batch."""
    size, form = arguments
    torch.set_num_threads(1)
    stage, given, targets = stage_of(size)
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is now
    before = resident("VmRSS")
    micro_batch(stage, given, targets, form)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process, now (`VmRSS`) or at most so far (`VmHWM`)."""
    status = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in status if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def measure(size: Size, *, rounds: int) -> dict[str, Any]:
    """Tokens per second and peak bytes of each form."""
    stage, given, targets = stage_of(size)
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for turn in range(rounds + 1):
        for form in FORMS:
            took = micro_batch(stage, given, targets, form)
            if turn:  # the first warms up
                seconds[form].append(took)
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for form in FORMS:
        with context.Pool(1) as alone:
            [peaks[form]] = alone.map(peak_bytes, [(size, form)])
    tokens = size.batch * size.context
    return {
        "tokens_per_second": {form: tokens / min(times) for form, times in seconds.items()},
        "peak": peaks,
    }


def line(size: Size, measured: dict[str, Any]) -> str:
    rates, peaks = measured["tokens_per_second"], measured["peak"]
    tokens = size.batch * size.context
    head_chunks.LARGE_LOGITS = LARGE_LOGITS
    rows = chunk_rows(tokens=tokens, width=size.width, vocabulary=size.vocabulary, wide=4)
    cells = [
        size.name,
        f"{tokens:,}",
        f"{size.vocabulary:,}",
        "whole" if rows is None else f"chunks of {rows}",
        *(f"{rates[form]:,.0f}" for form in FORMS),
        f"{rates['chunks'] / rates['whole']:.2f}",
    ]
    if min(peaks.values()) < LEAST_PEAK:
        cells += ["-"] * 3
    else:
        cells += [*(f"{peaks[form] / 1e6:,.0f}" for form in FORMS), f"{peaks['chunks'] / peaks['whole']:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Head and loss, whole and in chunks.")
    parser.add_argument("--rounds", type=int, default=3, help="timed micro-batches of each form")
    parser.add_argument("--out", type=Path, help="folder of the dated page; default: print it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [line(size, measure(size, rounds=options.rounds)) for size in SIZES]
    columns = ["last stage", "tokens", "vocabulary", "chosen", "tokens/s, whole", "in chunks", "ratio"]
    columns += ["peak MB, whole", "in chunks", "ratio"]
    text = f"""# Head and loss, whole and in chunks, {today()}

| {" | ".join(columns)} |
|{"---|" * len(columns)}
{chr(10).join(lines)}

One block and the head, forward and backward, float32. Processor time on one thread, fastest of
{options.rounds} rounds; peak memory above weights and gradients.

Conditions: {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__},
Python {platform.python_version()}.

```sh
python benchmarks/head_loss.py --rounds {options.rounds} --out benchmarks/results
```
"""
    if options.out is None:
        print(text)
    else:
        write_dated(options.out, "head-loss", text)


if __name__ == "__main__":
    main()
