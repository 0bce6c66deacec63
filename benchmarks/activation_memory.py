"""Activations of the fullest rank under 2bw and 2bw-v, measured on processes, beside the planner's.

    python benchmarks/activation_memory.py --out benchmarks/results

Every rank is a process of its own and all arms run on the same processes. A rank's activations are the most
that its stages held at one time, as the rows of a run report them. The model is cut evenly, without regard to
the head, so that schedules are compared on equal shares.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dated import write_dated

from schedules import find
from stages.comm.process import Process, connected
from stages.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from stages.memory.estimate import rank_activations
from stages.pipeline.segments import segment_program
from stages.trainer import train


class Arm(NamedTuple):
    schedule: str
    ahead: int = 1
    split: bool = False

    def __str__(self) -> str:
        return self.schedule + ", split" * self.split + f", ahead {self.ahead}" * (self.ahead > 1)


ARMS = (
    Arm("2bw"),
    Arm("2bw", ahead=2),
    Arm("2bw-v"),
    Arm("2bw-v", split=True),
    Arm("2bw-v", ahead=2),
    Arm("2bw-v", ahead=2, split=True),
)


class LastSegment:
    """A recorder that keeps the memory of the last segment."""

    def __init__(self) -> None:
        self.memory: dict[str, list[int]] = {}

    def append(self, row: Mapping[str, Any]) -> None:
        self.memory = row.get("memory", self.memory)

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        pass


def config_of(options: argparse.Namespace, arm: Arm) -> RunConfig:
    stages = options.ranks * find(arm.schedule).stages_per_rank
    if options.blocks * options.ranks % stages:
        raise SystemExit("accepted: --blocks that the two stages of a rank can share")
    config = RunConfig(
        schedule=ScheduleConfig(
            name=arm.schedule, microbatches=options.microbatches, ahead=arm.ahead, split=arm.split
        ),
        optimizer=OptimizerConfig(name="adamw", lr=1e-4),
        model=ModelConfig(
            name="benchmark",
            layers=options.blocks * options.ranks,
            width=options.width,
            heads=4,
            kv_heads=4,
            mlp_width=3 * options.width,
        ),
        data=DataConfig(context=options.context),
        parallel=ParallelConfig(
            stages=options.ranks, cut=[options.blocks * options.ranks // stages] * stages
        ),
        train=TrainConfig(
            steps=3,
            microbatch_size=1,
            eval_interval=3,
            eval_microbatches=1,
            checkpoint_interval=0,
            precision="bfloat16",
        ),
    )
    config.site.device = "cpu"
    return config


def work(rank: int, folder: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    held = []
    site = config_of(options, ARMS[0]).site
    with connected(
        rank=rank,
        size=options.ranks,
        local_rank=rank,
        local_size=options.ranks,
        rendezvous=Path(folder),
        site=site,
    ) as process:
        for arm in ARMS:
            held.append(activations(process, config_of(options, arm)))
    if rank == 0:
        results.put(held)


def activations(process: Process, config: RunConfig) -> list[int]:
    """Bytes of each rank."""
    recorder = LastSegment()
    train(config, process=process, recorder=recorder)
    return next(memory["rank_activations"] for memory in process.gather(recorder.memory) if memory)


def measured(options: argparse.Namespace) -> list[list[int]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.trainer"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, folder, options, results), daemon=True)
            for rank in range(options.ranks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            if worker.exitcode:
                raise SystemExit("a process failed")
        held: list[list[int]] = results.get()
    return held


class Row(NamedTuple):
    """One arm: bytes of activations of its fullest rank."""

    arm: str
    size: int
    planned: int
    share: float
    """Of 2bw's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=8, help="per rank")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for a dated Markdown table")
    options = parser.parse_args()
    rows: list[Row] = []
    for arm, held in zip(ARMS, measured(options), strict=True):
        config = config_of(options, arm)
        program = segment_program(config, first_step=0, steps=config.train.steps)
        planned, size = max(rank_activations(config, program)), max(held)
        rows.append(Row(str(arm), size, planned, size / (rows[0].size if rows else size)))
    where = (
        f"{options.ranks} processes, {options.blocks} blocks per rank of width {options.width}, "
        f"{options.microbatches} micro-batches of {options.context} tokens, bfloat16; "
        f"torch {torch.__version__}, Python {platform.python_version()}."
    )
    if options.json:
        print(json.dumps({"conditions": where, "rows": [row._asdict() for row in rows]}, indent=1))
        return
    lines = [
        "| schedule | activations of the fullest rank, bytes | planned | of 2bw's |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row.arm} | {row.size:,} | {row.planned:,} | {row.share:.3f} |" for row in rows]
    text = f"{where}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if options.out:
        command = f"```sh\npython benchmarks/activation_memory.py {' '.join(sys.argv[1:])}\n```\n"
        title = "# Activations of the fullest rank, measured on processes"
        write_dated(options.out, "activation-memory", f"{title}\n\n{text}\n{command}")


if __name__ == "__main__":
    main()
