"""The planner's step time, from measured costs of the parts, beside that of a real pipeline of two processes.

    python benchmarks/plan_step_time.py --out benchmarks/results

Costs and steps are measured by turns: before and after the few steps of every schedule both processes measure
the parts of the model at the same time, as a pipeline would compute them, and a message's way between them.
The plan is made from the mean of these two, so that a load that comes and goes meets both. A round has every
schedule once; the figure is the median over the rounds of planned over measured, with its quartiles.

The error has two parts. `compute` is planned over measured for what a rank computes in a step (the mean over
the ranks), `wait` the share of the step in which it waits, planned and measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from dated import write_dated

from asyncpp_cli.planner.estimate import estimate
from asyncpp_cli.planner.profile_costs import FORMAT, Measured, conditions
from stages.comm.process import Communicator, Process, connected
from stages.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from stages.profile import measure
from stages.trainer import train

RANKS = 2
SCHEDULES = ("1f1b", "zero-bubble", "2bw", "paci")


class Rows(list[dict[str, Any]]):
    """A recorder that keeps rows in memory."""

    def append(self, row: Mapping[str, Any]) -> None:
        super().append(dict(row))

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        pass

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self if row["kind"] == kind]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step in the steady state."""

    seconds: float
    wait: float
    """Share of it in which a rank waits, as a mean over the ranks."""

    @property
    def compute(self) -> float:
        """Seconds that a rank computes."""
        return self.seconds * (1 - self.wait)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One schedule in one round."""

    planned: Step
    measured: Step


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


def measured_costs(process: Process, between: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What a file of `asyncpp plan --measure` has, from both processes at once."""
    config = config_of(options, SCHEDULES[0])
    process.gather(None)
    parts = measure(
        config,
        device=process.device,
        microbatch_sizes=[options.microbatch_size],
        repeats=options.repeats,
        progress=lambda what: None,
    )
    message = message_seconds(process, between, config)
    return {
        "parts": mean_of(*process.gather(parts)),
        "message_seconds": mean_of(*process.gather(message)),
    }


def measured_step(process: Process, config: RunConfig) -> Step:
    """The median step of a short run; the first, in which the pipeline fills, left out."""
    rows = Rows()
    train(config, process=process, recorder=rows)
    found = []
    if rows:
        times = [row["seconds"] for row in rows.of_kind("step")]
        periods = [later - earlier for earlier, later in pairwise(times)][1:]
        busy = rows.of_kind("segment")[-1]["busy"]
        found.append(asdict(Step(seconds=statistics.median(periods), wait=1 - statistics.mean(busy))))
    (step,) = (Step(**step) for of_rank in process.gather(found) for step in of_rank)
    return step


def rounds(
    process: Process, options: argparse.Namespace, progress: Callable[[str], None]
) -> list[dict[str, Pair]]:
    """By schedule, planned and measured steps of each round."""
    between = process.communicator("benchmark", range(RANKS))
    header = {"format": FORMAT, "conditions": conditions(config_of(options, SCHEDULES[0]))}
    found = []
    before = measured_costs(process, between, options)
    for number in range(options.rounds):
        of_round = {}
        for schedule in SCHEDULES:
            config = config_of(options, schedule)
            measured = measured_step(process, config)
            after = measured_costs(process, between, options)
            costs = Measured(Path("measured"), header | mean_of(before, after))
            expected = estimate(config, costs, limit_gb=None).step
            planned = Step(seconds=expected.seconds, wait=expected.bubble)
            of_round[schedule] = Pair(planned=planned, measured=measured)
            before = after
            ratio = planned.seconds / measured.seconds
            progress(f"round {number + 1} of {options.rounds}: {schedule} {ratio:.3f}")
        found.append(of_round)
    return found


def work(rank: int, folder: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    site = replace(RunConfig().site, device="cpu")
    with connected(
        rank=rank, size=RANKS, local_rank=rank, local_size=RANKS, rendezvous=Path(folder), site=site
    ) as process:
        results.put(rounds(process, options, say if rank == 0 else lambda line: None))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=7, help="of a schedule in a round; at least 3")
    parser.add_argument("--repeats", type=int, default=4, help="of each part, each time")
    parser.add_argument("--rounds", type=int, default=7, help="at least 2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for a dated Markdown table")
    options = parser.parse_args()
    if options.steps < 3 or options.rounds < 2:
        parser.error("accepted: --steps 3 or more, --rounds 2 or more")
    load = os.getloadavg()[0]
    rows = [summary(schedule, found) for schedule, found in by_schedule(in_processes(options)).items()]
    where = (
        f"{options.layers} blocks of width {options.width} on {RANKS} processes of one thread, "
        f"{options.microbatches} micro-batches x {options.microbatch_size} x {options.context} tokens, "
        f"{options.optimizer}; {options.rounds} rounds of {options.steps} steps. {os.cpu_count()} cores, "
        f"load {load:.1f} before; torch {torch.__version__}, Python {platform.python_version()}."
    )
    if options.json:
        print(json.dumps({"conditions": where, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"{where}\n\n{markdown(rows)}")
    if options.out:
        command = f"```sh\npython benchmarks/plan_step_time.py {' '.join(sys.argv[1:])}\n```\n"
        text = f"# The planner's step time beside a real pipeline's\n\n{where}\n\n{markdown(rows)}\n{command}"
        write_dated(options.out, "plan-step-time", text)


def in_processes(options: argparse.Namespace) -> list[dict[str, Pair]]:
    """What the processes of a pipeline found."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.trainer"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, folder, options, results), daemon=True)
            for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        found: list[dict[str, Pair]] | None = None
        while found is None:
            try:
                found = results.get(timeout=5)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    sys.exit("a process failed")
        for _ in workers[1:]:
            results.get()
        for worker in workers:
            worker.join()
    return found


def by_schedule(found: list[dict[str, Pair]]) -> dict[str, list[Pair]]:
    return {schedule: [of_round[schedule] for of_round in found] for schedule in SCHEDULES}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule, over the rounds: medians."""

    schedule: str
    planned_ms: float
    measured_ms: float
    ratio: float
    """Planned over measured."""
    quartiles: tuple[float, float]
    """Of the ratio."""
    compute: float
    """Planned over measured, of what a rank computes."""
    planned_wait: float
    measured_wait: float


def summary(schedule: str, pairs: list[Pair]) -> Row:
    lower, ratio, upper = statistics.quantiles(
        [pair.planned.seconds / pair.measured.seconds for pair in pairs], n=4, method="inclusive"
    )
    return Row(
        schedule=schedule,
        planned_ms=1e3 * statistics.median(pair.planned.seconds for pair in pairs),
        measured_ms=1e3 * statistics.median(pair.measured.seconds for pair in pairs),
        ratio=ratio,
        quartiles=(lower, upper),
        compute=statistics.median(pair.planned.compute / pair.measured.compute for pair in pairs),
        planned_wait=statistics.median(pair.planned.wait for pair in pairs),
        measured_wait=statistics.median(pair.measured.wait for pair in pairs),
    )


def markdown(rows: list[Row]) -> str:
    lines = [
        "| schedule | planned ms | measured ms | planned / measured | quartiles | compute | wait planned "
        "| wait measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.schedule, f"{row.planned_ms:.1f}", f"{row.measured_ms:.1f}", f"{row.ratio:.3f}"]
        cells += [" to ".join(f"{ratio:.3f}" for ratio in row.quartiles), f"{row.compute:.3f}"]
        cells += [f"{row.planned_wait:.1%}", f"{row.measured_wait:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
