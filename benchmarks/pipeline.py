"""How busy a pipeline keeps its stages: ours (2bw, 1f1b) compared with torch's Schedule1F1B, all in one run.

    python benchmarks/pipeline.py --ranks 8 --microbatches 8 --forward-ms 30
    python benchmarks/pipeline.py --ranks 8 --microbatches 8 --forward-ms 30 --ahead-v 2
    python benchmarks/pipeline.py --ranks 4 --microbatches 8 --data 2 --reduce-ms 96 --spread-ms 48
    python benchmarks/pipeline.py --ranks 8 --microbatches 16 --forward-ms 30 --head-ms 8

Compute is emulated: a stage sleeps a known time, twice as long backward as forward, so that many ranks can be
measured on few cores. Times are per step in steady state, the median over `--rounds` rounds in which the arms
take turns, so that a noisy machine meets all alike.

With `--data` there are several pipelines that add their gradients, and instead of torch's schedule each of
ours runs a second time over a network on which a reduction takes `--reduce-ms`, and sending the new weights
`--spread-ms`. A schedule that flushes cannot hide all of that: `least_lost_by_1f1b` is what it must lose
where gradients leave layer by layer under the last micro-batch's backward (`sleeping_stage.left_to_hide`) and
the new weights follow.

With `--ahead-v`, 2bw-v joins: two stages per rank, each half as long.

With `--head-ms`, the last stage has a head, too, of which each half of a backward takes as long as a forward;
an arm more has it in shards on all ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frame import conditions, in_turns, parser, publish
from sleeping_stage import (
    SHAPE,
    EmulatedBatches,
    NoUpdate,
    SleepingHeadShard,
    SleepingStage,
    SleepingWeights,
    SlowNetwork,
    left_to_hide,
)
from torch import nn

from schedules import Program, ScheduleError, build
from stages.comm.collectives import DistributedGroup
from stages.comm.process import Process, connected
from stages.comm.topology import connect
from stages.config.run_config import SiteConfig
from stages.liveness.stop_signal import never
from stages.model.head_loss import next_token_loss
from stages.pipeline.executor import RankExecutor
from stages.update.clock import HostClock
from stages.update.optimizer_step import StageState
from stages.update.update_phases import UpdateContext, UpdateRules
from stages.update.update_stream import OneStream

SHARDED = " with shards"
"""Of an arm's name."""
STEPS = 8
"""Steps of a timed segment; those between the first update and the last count."""


def program_of(options: argparse.Namespace, schedule: str, *, first_step: int) -> Program:
    name, *sharded = schedule.split(SHARDED)
    return build(
        name,
        stages=options.ranks,
        microbatches=options.microbatches,
        steps=STEPS,
        first_step=first_step,
        ahead={"2bw": options.ahead, "2bw-v": options.ahead_v}.get(name, 1),
        shard_head=bool(sharded),
    )


def ours(process: Process, options: argparse.Namespace, schedule: str, *, slow: bool) -> Callable[[], float]:
    """One timed segment of our executor: seconds per step in steady state."""
    step = 0
    program = program_of(options, schedule, first_step=0)
    rank_of_stage = program.rank_of_stage
    connection = connect(
        process,
        program,
        shape=SHAPE,
        dtype=torch.float32,
        common_step=True,
    )
    if slow:
        connection = replace(connection, data=slow_group(process, options, schedule))
    own = [stage for stage, holder in enumerate(rank_of_stage) if holder == connection.rank]
    blocks = [stage for stage in own if stage <= program.loss_stage]
    seconds, head = options.forward_ms / 1e3 / len(blocks), options.head_ms / 1e3

    def module_of(stage: int) -> nn.Module:
        if stage > program.loss_stage:
            return SleepingHeadShard(head / options.ranks, rank=connection.rank)
        has_head = stage == program.loss_stage and not program.head_shards
        return SleepingStage(seconds + head * has_head, data=connection.data.size)

    context = UpdateContext(
        stages={
            stage: StageState(
                weights=SleepingWeights(module_of(stage), data=connection.data), update=NoUpdate()
            )
            for stage in own
        },
        connection=connection,
        rules=UpdateRules(clip="global", common_step=True, max_skipped=0),
        clock=HostClock(),
        on_step=lambda result: None,
        stop=never,
    )
    executor = RankExecutor(context, batches=EmulatedBatches(), streams=OneStream())

    def segment() -> float:
        nonlocal step
        program = program_of(options, schedule, first_step=step)
        step += STEPS
        for _ in executor.run(program):
            pass
        connection.links.finish()
        return executor.trace.steady_seconds / (STEPS - 1)

    return segment


def slow_group(process: Process, options: argparse.Namespace, schedule: str) -> DistributedGroup:
    """The data ranks of this process's stage, over a slow network."""
    rank, data_rank = divmod(process.rank, options.data)
    peers = [rank * options.data + other for other in range(options.data)]
    communicator = process.communicator(f"slow {schedule} {rank}", peers)
    slow = SlowNetwork(
        communicator,
        seconds=options.reduce_ms / 1e3,
        spread=options.spread_ms / 1e3,
        owners=options.data,
    )
    return DistributedGroup(slow, rank=data_rank, size=options.data)


def torchs(process: Process, options: argparse.Namespace, *, steps: int) -> Callable[[], float]:
    """So many steps of torch's Schedule1F1B: seconds per step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    # torch's pipeline wants a group of all processes; ours has none.
    dist.init_process_group("gloo", store=process.store, rank=process.rank, world_size=process.size)  # noqa: TID251
    first, last = process.rank == 0, process.rank == process.size - 1
    count = options.microbatches
    module = SleepingStage((options.forward_ms + options.head_ms * last) / 1e3, data=1)
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


def measure(rank: int, folder: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """A rank's process. Returns seconds per step, by arm and round: those of the slowest rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    site = SiteConfig(device="cpu")
    size = options.ranks * options.data
    with connected(
        rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=Path(folder), site=site
    ) as process:
        arms = {name: ours(process, options, name, slow=False) for name in schedules(options)}
        if options.data == 1:
            arms["torch"] = torchs(process, options, steps=STEPS)
        else:
            for name in ("2bw", "1f1b"):
                arms[f"{name} slow"] = ours(process, options, name, slow=True)

        def all_at_once(segment: Callable[[], float]) -> float:
            process.meetings.gather(None)
            return segment()

        own = in_turns({arm: partial(all_at_once, arms[arm]) for arm in arms}, rounds=options.rounds)
        return {
            arm: [max(of_round) for of_round in zip(*process.meetings.gather(times), strict=True)]
            for arm, times in own.items()
        }


def schedules(options: argparse.Namespace) -> list[str]:
    return ["2bw", "1f1b"] + ["2bw-v"] * bool(options.ahead_v) + ["2bw" + SHARDED] * bool(options.head_ms)


def run(options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.trainer"])
    size = options.ranks * options.data
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, context) as pool:
        ranks = [pool.submit(measure, rank, folder, options) for rank in range(size)]
        by_round, *_ = [rank.result() for rank in as_completed(ranks)]  # the first failure is raised
    seconds = {arm: statistics.median(times) for arm, times in by_round.items()}
    p, m = options.ranks, options.microbatches
    compute = 3 * (options.forward_ms + options.head_ms / p) / 1e3 * m
    busy = {f"busy_{arm.replace(' ', '_')}": compute / of_arm for arm, of_arm in seconds.items()}
    if options.data > 1:
        least = left_to_hide(backward=2 * options.forward_ms / 1e3, reduction=options.reduce_ms / 1e3)
        least += options.spread_ms / 1e3
        lost = {f"lost_by_{name}": 1 - seconds[name] / seconds[f"{name} slow"] for name in ("2bw", "1f1b")}
        return {**busy, **lost, "least_lost_by_1f1b": least / (seconds["1f1b"] + least)}
    return {
        **busy,
        "speedup_over_torch_1f1b": seconds["torch"] / seconds["2bw"],
        "speedup_by_round": [
            synchronous / delayed
            for synchronous, delayed in zip(by_round["torch"], by_round["2bw"], strict=True)
        ],
        "theory_speedup": None if options.head_ms else (m + p - 1) / m,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument(
        "--ahead", type=int, default=1, help="forwards 2bw runs ahead for each stage behind"
    )
    arguments.add_argument("--ahead-v", type=int, default=0, help="`ahead` of 2bw-v; 0: without 2bw-v")
    arguments.add_argument(
        "--forward-ms", type=float, default=30.0, help="a stage's sleep; twice that backward"
    )
    arguments.add_argument("--head-ms", type=float, default=0.0, help="the head's sleep, beside the stages'")
    arguments.add_argument("--data", type=int, default=1, help="pipelines that add their gradients")
    arguments.add_argument("--reduce-ms", type=float, default=100.0, help="with --data: time of a reduction")
    arguments.add_argument("--spread-ms", type=float, default=0.0, help="and of sending the new weights")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    try:
        for schedule in schedules(options):
            program_of(options, schedule, first_step=0)
    except ScheduleError as error:
        arguments.error(str(error))
    where = conditions(options, steps_per_round=STEPS - 1)
    publish("pipeline", "The pipeline compared with torch's Schedule1F1B", [run(options)], where, options)


if __name__ == "__main__":
    main()
