"""torch's fully_shard beside pipelines: the same model and tokens per step over links of limited rate.

    python benchmarks/fsdp.py --rates 200,1000 --batches 16,64 --out benchmarks/results
    python benchmarks/fsdp.py --ranks 4 --schedules 1f1b,zb-v,2bw --local-steps 8 --rates 100,1000

Ranks run in network namespaces of their own, each with one link to a bridge, both ends of which send at most
`--rates` Mbit/s (tc's tbf). Compute is emulated: a block sleeps a known time for each sequence, twice as long
backward, so that several ranks can be measured on few cores; weights, gradients and messages are real, in
float32. There is no update. At each rate and batch the arms take turns over `--rounds` rounds. `planned` is
what the closed forms of the planner make of these times, and of what the exchanges of a block take by
themselves, which are three further arms; messages go at the rate of the gather. Of these three arms it is
bytes and rate. Over gloo a host waits for each exchange of fully_shard, so nothing of it is hidden, and a
reduce-scatter, `reduce`, sends what an all-reduce does; `schedule: fsdp`, the arm `fsdp`, sums by an
all-to-all, `sum`, which sends half as much between two ranks, and adds in the order of ranks. With
`--local-steps H` an arm `local` is data parallelism that averages the weights every H steps. Needs root,
ip(8) and tc(8).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipeline
import sleeping_model
import sleeping_stage
import torch
import torch.distributed as dist
from frame import conditions, in_turns, parser, publish
from sleeping_model import SleepingBlock
from sleeping_stage import EmulatedBatches, NoUpdate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from asyncpp_cli.planner.costs.links import Exchange
from asyncpp_cli.planner.fsdp import Unit, Units, step_seconds
from asyncpp_cli.planner.programs import Geometry, LayoutProgram, Shape
from asyncpp_cli.planner.sharding import Sharding as Division
from asyncpp_cli.planner.stage_times import StageTimes
from schedules import Program, build, find
from stages.comm.process import Process, connected
from stages.comm.sharding import Sharding, connect_sharding
from stages.comm.topology import connect
from stages.config.run_config import DataConfig, ModelConfig, RunConfig, SiteConfig, TrainConfig
from stages.liveness.stop_signal import never
from stages.pipeline.executor import RankExecutor
from stages.shape.partition import cut_model
from stages.update.clock import HostClock
from stages.update.optimizer_step import StageState
from stages.update.update_phases import UpdateContext, UpdateRules
from stages.update.update_stream import OneStream
from stages.weights.sharded_weights import ShardedWeights

CONTEXT = 128
EXCHANGES = ("gather", "reduce", "sum")
LARGEST_PACKET = 16_000
BURST_SECONDS, LEAST_BURST = 0.001, 20_000
"""What tc lets through at once: seconds of the rate, and bytes at least: more than the largest packet."""


def by_fully_shard(options: argparse.Namespace, batch: int) -> Callable[[], float]:
    """Measures seconds per step; a rank has its share of the batch at once."""
    seconds = options.sequence_ms / 1e3 * batch / options.ranks
    model = nn.Sequential(*(SleepingBlock(options.values, seconds) for _ in range(options.layers)))
    mesh = dist.init_device_mesh("cpu", (options.ranks,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step() -> None:
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        model.zero_grad()

    def segment() -> float:
        step()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(pipeline.STEPS - 1):
            step()
        return (time.perf_counter() - started) / (pipeline.STEPS - 1)

    return segment


class _Tokens(EmulatedBatches):
    """Two sequences of four tokens, whatever the batch."""

    def tokens(self, microbatch: int) -> Tensor:
        return torch.zeros((2, 4), dtype=torch.long)

    targets = tokens


def by_schedule_fsdp(process: Process, options: argparse.Namespace, batch: int) -> Callable[[], float]:
    """Measures seconds per step of `schedule: fsdp`, without an update; a rank has its share at once."""
    sleeping_model.VALUES = options.values
    sleeping_model.SECONDS = options.sequence_ms / 1e3 * batch / options.ranks
    shape: dict[str, Any] = {"layers": options.layers, "width": 4, "heads": 1, "kv_heads": 1, "vocab_size": 4}
    config = RunConfig(
        model=ModelConfig(name="sleeping", factory="sleeping_model:parts", mlp_width=4, **shape),
        data=DataConfig(context=4),
        train=TrainConfig(precision="float32"),
    )
    step = 0

    def program() -> Program:
        asked = {"stages": options.ranks, "microbatches": options.ranks, "steps": pipeline.STEPS}
        return build("fsdp", first_step=step, **asked)

    connection = connect(
        process, program(), shape=(2, 4, 4), dtype=torch.float32, common_step=True, shards=options.ranks
    )
    assert connection.sharding is not None
    (cut,) = cut_model(config.model, stages=1, context=4)
    weights = ShardedWeights(
        config,
        cut,
        in_place=lambda name, dimensions: True,
        sharding=connection.sharding,
        device=process.device,
    )
    context = UpdateContext(
        stages={0: StageState(weights=weights, update=NoUpdate())},
        connection=connection,
        rules=UpdateRules(clip="global", common_step=True, max_skipped=0),
        clock=HostClock(),
        on_step=lambda result: None,
        stop=never,
    )
    executor = RankExecutor(context, batches=_Tokens(), streams=OneStream())

    def segment() -> float:
        nonlocal step
        running = program()
        step += pipeline.STEPS
        for _ in executor.run(running):
            pass
        connection.links.finish()
        return executor.trace.steady_seconds / (pipeline.STEPS - 1)

    return segment


def by_itself(options: argparse.Namespace, exchange: str, sharding: Sharding) -> Callable[[], float]:
    """Measures seconds of an exchange of a block."""
    whole, shard = torch.zeros(options.values), torch.zeros(options.values // options.ranks)

    def segment() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(options.layers):
            if exchange == "gather":
                dist.all_gather_into_tensor(whole, shard)
            elif exchange == "sum":
                sharding.scatter(shard, whole)
            else:
                dist.reduce_scatter_tensor(shard, whole)
        return (time.perf_counter() - started) / options.layers

    return segment


def by_local_steps(options: argparse.Namespace, batch: int) -> Callable[[], float]:
    """Measures seconds per step; a rank has its share of the batch, and averages its weights in the end."""
    seconds = 3 * options.layers * options.sequence_ms / 1e3 * batch / options.ranks
    blocks = [torch.zeros(options.values) for _ in range(options.layers)]

    def segment() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(options.local_steps):
            time.sleep(seconds)
        for block in blocks:
            dist.all_reduce(block)
        return (time.perf_counter() - started) / options.local_steps

    return segment


def by_executor(
    process: Process, options: argparse.Namespace, schedule: str, batch: int
) -> Callable[[], float]:
    """Measures seconds per step of a pipeline."""
    size = batch // options.microbatches
    sleeping_stage.SHAPE = pipeline.SHAPE = (size, CONTEXT, options.width)
    options.forward_ms = options.sequence_ms * size * options.layers / options.ranks
    return pipeline.ours(process, options, schedule, slow=False)


def measure(options: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """A rank's process: seconds per step of the slower rank, by batch, arm and round."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    site, found = SiteConfig(device="cpu"), {}
    with connected(
        rank=options.rank,
        size=options.ranks,
        local_rank=0,
        local_size=1,
        rendezvous=options.folder,
        site=site,
    ) as process:
        # Its group is of this process alone, and gives way to the one that follows.
        sharding = connect_sharding(process, name="sum", shards=options.ranks)
        arms_of = {batch: by_schedule_fsdp(process, options, batch) for batch in options.batches}
        # torch's fully_shard wants a group of all processes; ours has none.
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=process.store, rank=process.rank, world_size=options.ranks)  # noqa: TID251
        for batch in options.batches:
            arms = {name: by_executor(process, options, name, batch) for name in options.schedules}
            arms["fully_shard"] = by_fully_shard(options, batch)
            arms["fsdp"] = arms_of[batch]
            if options.local_steps:
                arms["local"] = by_local_steps(options, batch)
            arms |= {exchange: by_itself(options, exchange, sharding) for exchange in EXCHANGES}
            own = in_turns(arms, rounds=options.rounds)
            both = {arm: process.meetings.gather(seconds) for arm, seconds in own.items()}
            found[batch] = {
                arm: [max(of_round) for of_round in zip(*seconds, strict=True)]
                for arm, seconds in both.items()
            }
        dist.destroy_process_group()
    return found


def planned(
    options: argparse.Namespace, batch: int, exchanges: dict[str, float], *, rate: float
) -> dict[str, float]:
    """Seconds by arm; `exchanges`: those of a block by themselves."""
    width = 4
    gathered = options.values * width * (1 - 1 / options.ranks)
    per_second = gathered / exchanges["gather"]
    size = batch // options.microbatches
    compute = options.sequence_ms / 1e3 * batch / options.ranks
    seconds = {}
    for name in options.schedules:
        chunks = find(name).stages_per_rank
        stages = options.ranks * chunks
        forward = options.sequence_ms / 1e3 * size * options.layers / stages
        times = StageTimes(
            forward=(forward,) * stages,
            backward=(2 * forward,) * stages,
            input_half=(forward,) * stages,
            weight_half=(forward,) * stages,
            update=(0.0,) * stages,
            reduction=(0.0,) * stages,
            message=(size * CONTEXT * options.width * width / per_second,) * stages,
        )
        shape = Shape(name, options.ranks, options.microbatches, (("chunks", chunks),), False, False)
        geometry = Geometry(shape, 0, 1, find(name).synchronous)
        # It has every micro-batch of the step, so none is left to follow at a pace.
        seconds[name] = LayoutProgram(geometry).step(times, pace=0.0).seconds
    waited = {name: Exchange(each, each) for name, each in exchanges.items()}
    block = Unit(forward=compute, backward=2 * compute, gather=waited["gather"], reduce=waited["reduce"])
    nothing = Unit(forward=0.0, backward=0.0)
    units = Units(embedding=nothing, blocks=[block] * options.layers, head=nothing)
    seconds["fully_shard"] = step_seconds(units, Division(ranks=options.ranks), microbatches=1)
    units = replace(units, blocks=[replace(block, reduce=waited["sum"])] * options.layers)
    seconds["fsdp"] = step_seconds(units, Division(ranks=options.ranks), microbatches=1)
    if options.local_steps:
        # Over gloo a reduction is an all-reduce.
        averaging = options.layers * exchanges["reduce"]
        seconds["local"] = 3 * options.layers * compute + averaging / options.local_steps
    nominal = gathered / (rate * 1e6 / 8)
    return seconds | {"gather": nominal, "reduce": 2 * nominal, "sum": nominal}


@contextmanager
def joined_namespaces(count: int) -> Iterator[list[str]]:
    """Names of new network namespaces, each joined by a link to a bridge in one more, the last of the names.

    Both ends of a link have the name of the rank's namespace.
    """
    base = f"afsdp{os.getpid()}"
    *names, hub = [f"{base}n{number}" for number in range(count)] + [f"{base}hub"]
    commands = [f"ip netns add {name}" for name in [*names, hub]]
    commands += [f"ip -n {hub} link add {hub} type bridge", f"ip -n {hub} link set {hub} up"]
    for number, name in enumerate(names, start=1):
        commands += [
            f"ip link add {name} netns {name} type veth peer name {name} netns {hub}",
            f"ip -n {hub} link set {name} master {hub}",
            f"ip -n {hub} link set {name} up",
            # Addresses for benchmarks of networks, RFC 2544.
            f"ip -n {name} addr add 198.18.79.{number}/24 dev {name}",
            *(f"ip -n {name} link set {end} up" for end in ("lo", name)),
            # Larger ones would need larger bursts, and messages would pass in these.
            *(f"ip -n {end} link set {name} gso_max_size {LARGEST_PACKET}" for end in (name, hub)),
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield [*names, hub]
    finally:
        for name in [*names, hub]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def at_rate(names: list[str], options: argparse.Namespace, *, rate: float) -> dict[str, Any]:
    """As `measure`, by new processes, one in each namespace but the last, the bridge's."""
    *names, hub = names
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, name in enumerate(names):
            burst = max(LEAST_BURST, int(rate * 1e6 / 8 * BURST_SECONDS))
            shape = f"rate {rate}mbit burst {burst} latency 200ms"
            for end in (name, hub):
                subprocess.run(f"tc -n {end} qdisc replace dev {name} root tbf {shape}".split(), check=True)
            command = ["ip", "netns", "exec", name, sys.executable, __file__, *sys.argv[1:]]
            ranks.append(
                subprocess.Popen(
                    [*command, "--rank", str(rank), "--folder", folder],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": name},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"fsdp.py: a rank failed at {rate:g} Mbit/s")
    return {int(batch): found for batch, found in json.loads(outputs[0].splitlines()[-1]).items()}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rates", type=numbers, default=[200, 1000], help="of the link, Mbit/s")
    arguments.add_argument("--batches", type=numbers, default=[16, 64], help="sequences per step")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--schedules", type=words, default=["1f1b", "2bw"], help="of the pipelines")
    arguments.add_argument("--local-steps", type=int, default=0, help="between averages; 0: no such arm")
    arguments.add_argument("--microbatches", type=int, default=8, help="of a pipeline's step")
    arguments.add_argument("--layers", type=int, default=8, help="blocks of the model")
    arguments.add_argument("--width", type=int, default=256, help="of the activations that a pipeline sends")
    arguments.add_argument("--values", type=int, default=2**19, help="weights of a block")
    arguments.add_argument("--sequence-ms", type=float, default=2.0, help="forward of a sequence in a block")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--csv", type=Path, help="file for the seconds of each round")
    arguments.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    # What `pipeline` asks for besides.
    arguments.set_defaults(data=1, ahead=1, ahead_v=0, head_ms=0.0)
    options = arguments.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options)), flush=True)
        return
    rows: list[dict[str, Any]] = []
    raw: list[list[Any]] = []
    with joined_namespaces(options.ranks) as names:
        for rate in options.rates:
            for batch, found in at_rate(names, options, rate=rate).items():
                exchanges = {name: statistics.median(found[name]) for name in EXCHANGES}
                expected = planned(options, batch, exchanges, rate=rate)
                for arm, seconds in found.items():
                    median = statistics.median(seconds)
                    raw += [
                        [rate, batch, options.microbatches, arm, number, repr(each), repr(expected[arm])]
                        for number, each in enumerate(seconds)
                    ]
                    rows.append(
                        {
                            "Mbit/s": rate,
                            "sequences": batch,
                            "arm": arm,
                            "ms": 1e3 * median,
                            "lowest round": 1e3 * min(seconds),
                            "highest round": 1e3 * max(seconds),
                            "planned": 1e3 * expected[arm],
                            "planned / measured": expected[arm] / median,
                        }
                    )
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["mbit_s", "sequences", "microbatches", "arm", "round", "seconds", "planned"])
            writer.writerows(raw)
    del options.rank, options.folder, options.csv
    where = conditions(options, context=CONTEXT, steps_per_round=pipeline.STEPS - 1)
    publish("fsdp", "fully_shard beside pipelines over slow links", rows, where, options)


if __name__ == "__main__":
    main()
