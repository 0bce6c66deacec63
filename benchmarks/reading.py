"""How fast training reads batches, beside how fast the smallest shipped model consumes them.

    python benchmarks/reading.py DATA --vocab-size N --out benchmarks/results

DATA is what `data.path` takes. Reading is timed as a rank does it: `Batches.tokens` and `Batches.targets` of
one micro-batch after the other. Consuming is a whole run of `micro` (one stage, one thread, in this process,
after some steps to warm up) at the same sizes, its reading included. Writes `reading-DATE.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import today, write_dated

from asyncpp_cli.experiment.settings import assign
from asyncpp_cli.experiment.shipped import model_settings
from stages.config import RunConfig
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.data.shards import count
from stages.trainer import replay
from stages.validation import check

CONTEXTS = (128, 512)
WARM_UP = 3
STEPS = 12


class Times:
    """A recorder that keeps when each step was done."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def append(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "step":
            self.seconds.append(row["seconds"])

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        pass


def run_of(data: str, *, vocab_size: int, context: int) -> RunConfig:
    config = RunConfig()
    assign(config, model_settings("micro", None))
    settings = {
        "schedule.name": "1f1b",
        "optimizer.name": "adamw",
        "parallel.stages": 1,
        "model.vocab_size": vocab_size,
        "data.path": data,
        "data.context": context,
        "train.steps": WARM_UP + STEPS,
        "train.eval_interval": 1000,
        "train.eval_microbatches": 1,
        "site.device": "cpu",
        "site.threads": 1,
    }
    assign(config, settings)
    check(config)
    return config


def reading(config: RunConfig) -> float:
    """Tokens per second."""
    batches = Batches(config, prepare(config.data), device=torch.device("cpu"))
    microbatches = 400
    begun = time.perf_counter()
    for number in range(microbatches):
        batches.tokens(number)
        batches.targets(number)
    taken = time.perf_counter() - begun
    return microbatches * config.train.microbatch_size * config.data.context / taken


def consuming(config: RunConfig) -> float:
    """Tokens per second."""
    times = Times()
    replay(config, recorder=times)
    step = config.schedule.microbatches * config.train.microbatch_size * config.data.context
    return STEPS * step / (times.seconds[-1] - times.seconds[WARM_UP - 1])


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("data")
    options.add_argument("--vocab-size", type=int, required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    lines = []
    for context in CONTEXTS:
        config = run_of(given.data, vocab_size=given.vocab_size, context=context)
        load = os.getloadavg()[0]
        read, consumed = reading(config), consuming(config)
        lines.append(f"| {context} | {read:,.0f} | {consumed:,.0f} | {read / consumed:,.0f} | {load:.1f} |")
        print(lines[-1])
    corpus = prepare(config.data)
    title = f"# Reading batches, {today()}"
    train, size = corpus.train, config.train.microbatch_size
    conditions = (
        f"{count(train):,} tokens in {len(train)} shards ({train[0].dtype}). `micro` with {given.vocab_size} "
        f"tokens, one stage,\n{size} sequences per micro-batch, {config.schedule.microbatches} "
        f"micro-batches per step, AdamW, float32, one thread.\n{platform.machine()}, "
        f"torch {torch.__version__}, numpy "
        f"{np.__version__}. The machine's load, other programs\nincluded, stands beside each row."
    )
    head = "| context | read, tokens/s | consumed, tokens/s | ratio | load before |\n|---|---|---|---|---|"
    text = "\n\n".join(
        [title, conditions, head + "\n" + "\n".join(lines), "To hold: a ratio of at least 10."]
    )
    write_dated(given.out, "reading", text + "\n")


if __name__ == "__main__":
    main()
