"""How busy a pipeline keeps its stages: ours (2bw, 1f1b) compared with torch's Schedule1F1B, all in one run.

    python benchmarks/pipeline.py --ranks 8 --microbatches 8 --forward-ms 30
    python benchmarks/pipeline.py --ranks 8 --microbatches 8 --forward-ms 30 --ahead-v 2
    python benchmarks/pipeline.py --ranks 4 --microbatches 8 --data 2 --reduce-ms 100

Compute is emulated: a stage sleeps a known time, twice as long backward as forward, so that many ranks can be
measured on few cores. Times are per step in steady state, the median over `--rounds` rounds in which the arms
take turns, so that a noisy machine meets all alike.

With `--data` there are several pipelines that add their gradients, and instead of torch's schedule each of
ours runs a second time over a network on which a reduction takes `--reduce-ms`. A schedule that flushes
cannot hide all of that: `least_lost_by_1f1b` is what it must lose where gradients leave layer by layer under
the last micro-batch's backward (`sleeping_stage.left_to_hide`).

With `--ahead-v`, 2bw-v joins: two stages per rank, each half as long.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sleeping_stage import (
    SHAPE,
    EmulatedBatches,
    NoUpdate,
    SleepingStage,
    SleepingWeights,
    SlowNetwork,
    left_to_hide,
)

from schedules import Program, ScheduleError, build
from stages.comm.collectives import DistributedGroup
from stages.comm.process import Process, connected
from stages.comm.topology import connect
from stages.config import RunConfig
from stages.liveness.stop_signal import never
from stages.model.head_loss import next_token_loss
from stages.pipeline.clock import HostClock
from stages.pipeline.executor import RankExecutor
from stages.update.optimizer_step import StageState
from stages.update.step_decision import UpdateRules
from stages.update.update_stream import OneStream

STEPS = 8
"""Steps of a timed segment; those between the first update and the last count."""


def program_of(options: argparse.Namespace, schedule: str, *, first_step: int) -> Program:
    return build(
        schedule,
        stages=options.ranks,
        microbatches=options.microbatches,
        steps=STEPS,
        first_step=first_step,
        ahead={"2bw": options.ahead, "2bw-v": options.ahead_v}.get(schedule, 1),
    )


def ours(
    process: Process, options: argparse.Namespace, schedule: str, *, reduce_ms: float
) -> Callable[[], float]:
    """One timed segment of our executor: seconds per step in steady state."""
    step = 0
    rank_of_stage = program_of(options, schedule, first_step=0).rank_of_stage
    connection = connect(
        process,
        rank_of_stage=rank_of_stage,
        data_ranks=options.data,
        shape=SHAPE,
        dtype=torch.float32,
        common_step=True,
    )
    if reduce_ms:
        connection = replace(connection, data=slow_group(process, options, schedule, seconds=reduce_ms / 1e3))
    own = [stage for stage, holder in enumerate(rank_of_stage) if holder == connection.rank]
    seconds = options.forward_ms / 1e3 / len(own)
    executor = RankExecutor(
        rank=connection.rank,
        stages={
            stage: StageState(weights=SleepingWeights(seconds, data=connection.data), update=NoUpdate())
            for stage in own
        },
        connection=connection,
        batches=EmulatedBatches(),
        rules=UpdateRules(clip="global", common_step=True, max_skipped=0),
        clock=HostClock(),
        streams=OneStream(),
        on_step=lambda result: None,
        stop=never,
    )

    def segment() -> float:
        nonlocal step
        program = program_of(options, schedule, first_step=step)
        step += STEPS
        for _ in executor.run(program):
            pass
        connection.links.finish()
        return executor.trace.steady_seconds / (STEPS - 1)

    return segment


def slow_group(
    process: Process, options: argparse.Namespace, schedule: str, *, seconds: float
) -> DistributedGroup:
    """The data ranks of this process's stage, over a slow network."""
    rank, data_rank = divmod(process.rank, options.data)
    peers = [rank * options.data + other for other in range(options.data)]
    communicator = process.communicator(f"slow {schedule} {rank}", peers)
    slow = SlowNetwork(communicator, seconds=seconds)
    return DistributedGroup(slow, rank=data_rank, size=options.data)


def torchs(process: Process, options: argparse.Namespace, *, steps: int) -> Callable[[], float]:
    """So many steps of torch's Schedule1F1B: seconds per step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    # torch's pipeline wants a group of all processes; ours has none.
    dist.init_process_group("gloo", store=process.store, rank=process.rank, world_size=process.size)  # noqa: TID251
    first, last = process.rank == 0, process.rank == process.size - 1
    count = options.microbatches
    module = SleepingStage(options.forward_ms / 1e3, data=1)
    activation = torch.zeros(SHAPE, requires_grad=True)
    tokens = torch.zeros((count, *SHAPE[1:]), requires_grad=True)
    targets = torch.zeros((count, SHAPE[1]), dtype=torch.long)
    stage = PipelineStage(
        module,
        process.rank,
        process.size,
        process.device,
        input_args=(activation,),
        output_args=(activation,),
        group=dist.group.WORLD,
    )
    schedule = Schedule1F1B(stage, n_microbatches=count, loss_fn=next_token_loss)

    def step() -> None:
        if first:
            schedule.step(tokens)
        elif last:
            schedule.step(target=targets)
        else:
            schedule.step()

    def segment() -> float:
        step()
        started = time.perf_counter()
        for _ in range(steps - 1):
            step()
        return (time.perf_counter() - started) / (steps - 1)

    return segment


@contextmanager
def without_torch_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measure(rank: int, folder: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    site = RunConfig().site
    site.device = "cpu"
    with (
        without_torch_warnings(),
        connected(
            rank=rank,
            size=options.ranks * options.data,
            local_rank=rank,
            local_size=options.ranks * options.data,
            rendezvous=Path(folder),
            site=site,
        ) as process,
    ):
        arms = {
            "2bw": ours(process, options, "2bw", reduce_ms=0),
            "1f1b": ours(process, options, "1f1b", reduce_ms=0),
        }
        if options.ahead_v:
            arms["2bw-v"] = ours(process, options, "2bw-v", reduce_ms=0)
        if options.data == 1:
            arms["torch"] = torchs(process, options, steps=STEPS)
        else:
            arms["2bw slow"] = ours(process, options, "2bw", reduce_ms=options.reduce_ms)
            arms["1f1b slow"] = ours(process, options, "1f1b", reduce_ms=options.reduce_ms)
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(options.rounds):
            for arm, segment in arms.items():
                process.gather(None)
                seconds[arm].append(segment())
        # A step takes the pipeline as long as it takes its slowest rank.
        slowest = {
            arm: [max(of_round) for of_round in zip(*process.gather(times), strict=True)]
            for arm, times in seconds.items()
        }
        if rank == 0:
            results.put(slowest)


def run(options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.trainer"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=measure, args=(rank, folder, options, results))
            for rank in range(options.ranks * options.data)
        ]
        for worker in workers:
            worker.start()
        by_round: dict[str, list[float]] | None = None
        while by_round is None:
            try:
                by_round = results.get(timeout=1.0)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise SystemExit("a rank failed; see above") from None
        for worker in workers:
            worker.join()
    seconds = {arm: statistics.median(times) for arm, times in by_round.items()}
    p, m = options.ranks, options.microbatches
    compute = 3 * options.forward_ms / 1e3 * m
    busy = {
        "busy_2bw": compute / seconds["2bw"],
        "busy_1f1b": compute / seconds["1f1b"],
    }
    if options.ahead_v:
        busy["busy_2bw_v"] = compute / seconds["2bw-v"]
    if options.data > 1:
        least = left_to_hide(backward=2 * options.forward_ms / 1e3, reduction=options.reduce_ms / 1e3)
        return busy | {
            "busy_2bw_slow_reduction": compute / seconds["2bw slow"],
            "busy_1f1b_slow_reduction": compute / seconds["1f1b slow"],
            "lost_by_2bw": 1 - seconds["2bw"] / seconds["2bw slow"],
            "lost_by_1f1b": 1 - seconds["1f1b"] / seconds["1f1b slow"],
            "least_lost_by_1f1b": least / (seconds["1f1b"] + least),
        }
    return busy | {
        "busy_torch_1f1b": compute / seconds["torch"],
        "speedup_over_torch_1f1b": seconds["torch"] / seconds["2bw"],
        "speedup_by_round": [
            synchronous / delayed
            for synchronous, delayed in zip(by_round["torch"], by_round["2bw"], strict=True)
        ],
        "theory_speedup": (m + p - 1) / m,
    }


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "ranks": options.ranks,
        "data": options.data,
        "reduce_ms": options.reduce_ms,
        "microbatches": options.microbatches,
        "ahead": options.ahead,
        "ahead_v": options.ahead_v,
        "compute": f"sleep {options.forward_ms} ms forward, twice that backward",
        "rounds": options.rounds,
        "steps_a_round": STEPS - 1,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ahead", type=int, default=1, help="forwards 2bw runs ahead for each stage behind")
    parser.add_argument("--ahead-v", type=int, default=0, help="`ahead` of 2bw-v; 0: without 2bw-v")
    parser.add_argument("--forward-ms", type=float, default=30.0)
    parser.add_argument("--data", type=int, default=1, help="pipelines that add their gradients")
    parser.add_argument("--reduce-ms", type=float, default=100.0, help="with --data: what a reduction takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        for schedule in ("2bw", "2bw-v") if options.ahead_v else ("2bw",):
            program_of(options, schedule, first_step=0)
    except ScheduleError as error:
        parser.error(str(error))
    figures = run(options)
    if options.json:
        print(json.dumps({**figures, "conditions": conditions(options)}))
        return
    for name, value in {**conditions(options), **figures}.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")


if __name__ == "__main__":
    main()
