"""The planner's step time, from measured costs of the parts, beside that of a real pipeline of two processes.

    python benchmarks/plan_step_time.py --rounds 5

In each round both processes measure the parts of the model at the same time, as a pipeline would compute
them, and a message's way between them; then every schedule is trained for a few steps. The figure is the
median over the rounds of planned over measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

# A script's folder comes first on the path, where optimizers.py would stand in for the package of that name.
sys.path.sort(key=lambda entry: Path(entry or ".").resolve() == Path(__file__).resolve().parent)

import torch

from asyncpp_cli.planner.estimate import estimate
from asyncpp_cli.planner.measured import FORMAT, Measured, conditions
from stages.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    tokens_per_step,
)
from stages.process import Communicator, Process, connected
from stages.profile import measure
from stages.trainer import train

RANKS = 2
SCHEDULES = ("1f1b", "zero-bubble", "2bw", "paci")


class Rows(list[dict[str, Any]]):
    """A recorder that keeps rows in memory."""

    def append(self, row: Mapping[str, Any]) -> None:
        super().append(dict(row))

    def flush(self) -> None:
        pass

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        pass

    def segments(self) -> list[dict[str, Any]]:
        return [row for row in self if row["kind"] == "segment"]


def config_of(options: argparse.Namespace, schedule: str) -> RunConfig:
    config = RunConfig(
        schedule=ScheduleConfig(name=schedule, microbatches=options.microbatches),
        optimizer=OptimizerConfig(name=options.optimizer, lr=1e-4),
        model=ModelConfig(
            name="benchmark",
            layers=options.layers,
            width=options.width,
            heads=options.width // 32,
            kv_heads=options.width // 32,
            mlp_width=3 * options.width,
        ),
        data=DataConfig(context=options.context),
        parallel=ParallelConfig(stages=RANKS),
        train=TrainConfig(
            steps=options.steps,
            microbatch_size=options.microbatch_size,
            eval_interval=options.steps,
            eval_microbatches=1,
            checkpoint_interval=0,
            clip="stage" if schedule == "paci" else "global",
        ),
    )
    config.site.device = "cpu"
    return config


def message_seconds(process: Process, between: Communicator, config: RunConfig) -> float:
    """One activation's way to the other process, half of there and back."""
    shape = (config.train.microbatch_size, config.data.context, config.model.width)
    tensor = torch.zeros(shape)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        for sender in range(RANKS):
            if process.rank == sender:
                between.send([tensor], 1 - sender, 0).wait()
            else:
                between.recv([tensor], sender, 0).wait()
        times.append((time.perf_counter() - started) / 2)
    return statistics.median(times)


def mean_of(one: Any, other: Any) -> Any:
    """Of two measurements of the same form, number by number."""
    if isinstance(one, dict):
        return {key: mean_of(value, other[key]) for key, value in one.items()}
    return (one + other) / 2


def measured_seconds(process: Process, config: RunConfig) -> float:
    rows = Rows()
    train(config, process=process, recorder=rows)
    found = [
        tokens_per_step(config) * row["steady_seconds"] / row["steady_tokens"] for row in rows.segments()
    ]
    everyone = process.gather(found)
    return float(next(seconds for of_rank in everyone for seconds in of_rank))


def rounds(process: Process, options: argparse.Namespace) -> list[dict[str, tuple[float, float]]]:
    """By schedule, planned and measured seconds a step of each round."""
    base = config_of(options, "1f1b")
    between = process.communicator("benchmark", range(RANKS))
    found = []
    for _ in range(options.rounds):
        process.gather(None)
        parts = measure(
            base,
            device=process.device,
            microbatch_sizes=[options.microbatch_size],
            repeats=options.repeats,
            progress=lambda what: None,
        )
        message = message_seconds(process, between, base)
        content = {
            "format": FORMAT,
            "conditions": conditions(base),
            "parts": mean_of(*process.gather(parts)),
            "message_seconds": mean_of(*process.gather(message)),
        }
        costs = Measured(Path("measured"), content)
        of_round = {}
        for schedule in SCHEDULES:
            config = config_of(options, schedule)
            planned = estimate(config, costs, limit_gb=None).step.seconds
            of_round[schedule] = (planned, measured_seconds(process, config))
        found.append(of_round)
    return found


def work(rank: int, folder: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    site = replace(RunConfig().site, device="cpu")
    with connected(
        rank=rank, size=RANKS, local_rank=rank, local_size=RANKS, rendezvous=Path(folder), site=site
    ) as process:
        results.put((rank, rounds(process, options)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=8, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=10, help="of each part")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, folder, options, results)) for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        found = None
        while found is None:
            try:
                found = results.get(timeout=5)[1]
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    sys.exit("a process failed")
        for worker in workers:
            worker.join()
    report(found, options)


def report(found: list[dict[str, tuple[float, float]]], options: argparse.Namespace) -> None:
    rows = []
    for schedule in SCHEDULES:
        pairs = [of_round[schedule] for of_round in found]
        ratios = [planned / measured for planned, measured in pairs]
        rows.append(
            {
                "schedule": schedule,
                "planned_ms": 1e3 * statistics.median(planned for planned, _ in pairs),
                "measured_ms": 1e3 * statistics.median(measured for _, measured in pairs),
                "ratio": statistics.median(ratios),
                "ratios": sorted(ratios),
            }
        )
    where = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "options": {key: value for key, value in vars(options).items() if key != "json"},
    }
    if options.json:
        print(json.dumps({"conditions": where, "rows": rows}, indent=1))
        return
    print(f"{'schedule':12} {'planned ms':>10} {'measured ms':>11} {'ratio':>6}  all rounds")
    for row in rows:
        spread = " ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        times = f"{row['planned_ms']:10.1f} {row['measured_ms']:11.1f}"
        print(f"{row['schedule']:12} {times} {row['ratio']:6.3f}  {spread}")
    print(where)


if __name__ == "__main__":
    main()
