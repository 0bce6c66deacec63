"""What the executor costs beside computing and waiting: per action, and against a plain training loop.

    python benchmarks/action_overhead.py --json

Per action: two stages that compute next to nothing, in two processes and in one (replay). Counted is the CPU
time of the thread that runs the program, in which waiting is not, divided by the actions; what the same
stages take in a bare loop of forwards and backwards is taken off. Beside the median over the rounds stand the
lowest, which a busy machine disturbs least, and the wall-clock time less the time waited, with the compute.

Against a plain loop: replay of a single stage and an ordinary loop (forward, backward, clip, step) train the
same decoder on the same batches, in turns, a few steps each; the figure is the median of the ratios of
neighbours, with its quartiles.
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
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sleeping_stage import SHAPE, EmulatedBatches, NoUpdate, SleepingWeights
from torch import Tensor, nn

from optimizers.build import build_optimizer
from schedules import Program, build
from stages.comm.collectives import Group
from stages.comm.process import Process, connected
from stages.comm.topology import Connection, connect, connect_in_process
from stages.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.liveness.stop_signal import never
from stages.metrics.rows import step_row
from stages.model.decoder import Stage, initialise
from stages.model.head_loss import next_token_loss
from stages.model.moe.routing import Routing
from stages.model.partition import cut_model
from stages.pipeline.build import build_ranks
from stages.pipeline.clock import HostClock
from stages.pipeline.executor import RankExecutor
from stages.pipeline.rank_stats import StepResult
from stages.pipeline.replay import drive
from stages.update.lr_schedule import learning_rate_factor
from stages.update.optimizer_step import StageState
from stages.update.step_decision import UpdateRules
from stages.update.update_stream import OneStream

RANKS = 2
MICROBATCHES = 4
STEPS = 50
"""Of a timed segment of nearly empty stages."""
PLAIN_STEPS = 2
"""Of a turn of the comparison with a plain loop."""


class EmptyStage(nn.Module):
    """The least that has a forward, a backward and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(
        self, given: Tensor, routing: Routing | None = None, *, targets: Tensor | None = None
    ) -> Tensor:
        out = given * self.weight
        return out if targets is None else next_token_loss(out, targets)


class EmptyWeights(SleepingWeights):
    """In the place of `WeightVersions`: every version is the same nearly empty module."""

    def __init__(self, data: Group) -> None:
        super().__init__(0.0, data=data)
        self.module = EmptyStage()


def executor(connection: Connection) -> RankExecutor:
    weights = EmptyWeights(connection.data)
    return RankExecutor(
        rank=connection.rank,
        stages={connection.rank: StageState(weights=weights, update=NoUpdate())},
        connection=connection,
        batches=EmulatedBatches(),
        rules=UpdateRules(clip="global", common_step=True, max_skipped=0),
        clock=HostClock(),
        streams=OneStream(),
        on_step=lambda result: None,
        stop=never,
    )


def program_from(step: int) -> Program:
    return build("2bw", stages=RANKS, microbatches=MICROBATCHES, steps=STEPS, first_step=step)


def bare_seconds(*, last: bool) -> float:
    """CPU seconds that forward and backward of a nearly empty stage take, a segment's worth of them."""
    stage, batches = EmptyStage(), EmulatedBatches()
    gradient = torch.ones(SHAPE)
    started = time.thread_time()
    for microbatch in range(STEPS * MICROBATCHES):
        given = batches.tokens(microbatch).requires_grad_()
        out = stage(given)
        if last:
            torch.autograd.backward(next_token_loss(out, batches.targets(microbatch)) / MICROBATCHES)
        else:
            torch.autograd.backward(out, gradient)
    return time.thread_time() - started


def measure_rank(rank: int, folder: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    site = RunConfig().site
    site.device = "cpu"
    with connected(
        rank=rank, size=RANKS, local_rank=rank, local_size=RANKS, rendezvous=Path(folder), site=site
    ) as process:
        results.put((rank, distributed_rounds(process, rounds)))


def distributed_rounds(process: Process, rounds: int) -> list[dict[str, float]]:
    connection = connect(
        process, rank_of_stage=range(RANKS), data_ranks=1, shape=SHAPE, dtype=torch.float32, common_step=True
    )
    runner = executor(connection)
    found = []
    for number in range(rounds + 1):
        program = program_from(number * STEPS)
        actions = len(program.actions[process.rank])
        bare = bare_seconds(last=process.rank == RANKS - 1)
        process.gather(None)
        started = time.thread_time()
        drive([runner.run(program)])
        connection.links.finish()
        seconds = time.thread_time() - started
        trace = runner.trace
        assert trace.busy is not None
        wall = trace.busy * trace.steady_seconds / ((STEPS - 1) * (2 * MICROBATCHES + 1))
        found.append(
            {
                "overhead": (seconds - bare) / actions * 1e6,
                "with_compute": seconds / actions * 1e6,
                "wall_with_compute": wall * 1e6,
            }
        )
    return found[1:]


def distributed(rounds: int) -> dict[str, list[float]]:
    """Microseconds per action in each round, of the slower rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.trainer"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=measure_rank, args=(rank, folder, rounds, results))
            for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        by_rank: dict[int, list[dict[str, float]]] = {}
        while len(by_rank) < RANKS:
            try:
                rank, found = results.get(timeout=1.0)
                by_rank[rank] = found
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise SystemExit("a rank failed; see above") from None
        for worker in workers:
            worker.join()
    pairs = list(zip(*by_rank.values(), strict=True))
    return {name: [max(of_rank[name] for of_rank in pair) for pair in pairs] for name in pairs[0][0]}


def replayed(rounds: int) -> dict[str, list[float]]:
    """Microseconds per action in each round."""
    connections = connect_in_process(rank_of_stage=range(RANKS), data_ranks=1)
    runners = [executor(connection) for connection in connections]
    found: dict[str, list[float]] = {"overhead": [], "with_compute": []}
    for number in range(rounds + 1):
        program = program_from(number * STEPS)
        actions = sum(map(len, program.actions))
        bare = sum(bare_seconds(last=rank == RANKS - 1) for rank in range(RANKS))
        started = time.thread_time()
        drive([runner.run(program) for runner in runners])
        connections[0].links.finish()
        seconds = time.thread_time() - started
        if number:
            found["overhead"].append((seconds - bare) / actions * 1e6)
            found["with_compute"].append(seconds / actions * 1e6)
    return found


def decoder_config() -> RunConfig:
    """The quickstart's model and batches, on a single stage."""
    return RunConfig(
        schedule=ScheduleConfig(name="1f1b", microbatches=2),
        optimizer=OptimizerConfig(name="adamw"),
        model=ModelConfig(name="nano", layers=4, width=128, heads=4, kv_heads=2, mlp_width=384),
        data=DataConfig(context=128),
        parallel=ParallelConfig(stages=1),
        train=TrainConfig(steps=10**6, microbatch_size=8, eval_interval=10**6),
    )


def replay_of_one_stage(config: RunConfig) -> Callable[[int], None]:
    """Trains `PLAIN_STEPS` steps from the given one, as a replay does."""
    connections = connect_in_process(rank_of_stage=range(1), data_ranks=1)
    rows = []

    def on_step(result: StepResult) -> None:
        rows.append(json.dumps(step_row(result, tokens=0, seconds=result.time)))

    (rank,) = build_ranks(
        config,
        connections=connections,
        corpus=prepare(config.data),
        device=torch.device("cpu"),
        on_step=on_step,
        stop=never,
    )

    def turn(step: int) -> None:
        microbatches = config.schedule.microbatches
        program = build("1f1b", stages=1, microbatches=microbatches, steps=PLAIN_STEPS, first_step=step)
        drive([rank.executor.run(program)])
        connections[0].links.finish()

    return turn


def plain_loop(config: RunConfig) -> Callable[[int], None]:
    """The same steps as one would write them down."""
    (cut,) = cut_model(config.model, stages=1, context=config.data.context)
    module = Stage(config.model, cut, context=config.data.context)
    module.prepare(device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in module.named_parameters():
        initialise(parameter, name=name, seed=config.seed, layers=config.model.layers)
    optimizer = build_optimizer(
        dict(module.named_parameters()),
        name=config.optimizer.name,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        options={},
    )
    batches = Batches(config, prepare(config.data), device=torch.device("cpu"))
    count = config.schedule.microbatches
    rows = []

    def turn(step: int) -> None:
        for now in range(step, step + PLAIN_STEPS):
            total = 0.0
            for microbatch in range(now * count, (now + 1) * count):
                loss = (
                    next_token_loss(module(batches.tokens(microbatch)), batches.targets(microbatch)) / count
                )
                loss.backward()
                total += float(loss.detach())
            norm = nn.utils.clip_grad_norm_(module.parameters(), config.train.clip_norm)
            for group in optimizer.param_groups:
                factor = learning_rate_factor(config.optimizer, step=now, steps=config.train.steps)
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
            rows.append(json.dumps({"step": now, "train_loss": total, "grad_norm": float(norm)}))

    return turn


def against_plain_loop(turns: int) -> dict[str, dict[str, float]]:
    """Seconds of a replay of one stage over those of a plain loop: median and quartiles."""
    config = decoder_config()
    arms = {"replay": replay_of_one_stage(config), "plain": plain_loop(config)}
    clocks = {"cpu": time.process_time, "wall": time.perf_counter}
    ratios: dict[str, list[float]] = {clock: [] for clock in clocks}
    for turn in range(turns + 1):
        seconds: dict[str, dict[str, float]] = {clock: {} for clock in clocks}
        # Who goes first alternates, so that what one leaves in the caches meets both.
        for name in sorted(arms, reverse=bool(turn % 2)):
            before = {clock: read() for clock, read in clocks.items()}
            arms[name](turn * PLAIN_STEPS)
            for clock, read in clocks.items():
                seconds[clock][name] = read() - before[clock]
        if turn:
            for clock, of_arm in seconds.items():
                ratios[clock].append(of_arm["replay"] / of_arm["plain"])
    return {
        clock: dict(zip(("quartile_1", "median", "quartile_3"), statistics.quantiles(of_clock), strict=True))
        for clock, of_clock in ratios.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="of the nearly empty stages")
    parser.add_argument("--turns", type=int, default=40, help="of the comparison with a plain loop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name, found in (("distributed", distributed(options.rounds)), ("replay", replayed(options.rounds))):
        for part, microseconds in found.items():
            figures[f"{name}_{part}_us"] = statistics.median(microseconds)
        figures[f"{name}_overhead_lowest_us"] = min(found["overhead"])
    for clock, of_clock in against_plain_loop(options.turns).items():
        for part, ratio in of_clock.items():
            figures[f"replay_over_plain_{clock}_{part}"] = ratio
    conditions = {
        "rounds": options.rounds,
        "turns": options.turns,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if options.json:
        print(json.dumps({**figures, "conditions": conditions}))
        return
    for key, value in {**conditions, **figures}.items():
        print(f"{key:36} {value:.3f}" if isinstance(value, float) else f"{key:36} {value}")


if __name__ == "__main__":
    main()
