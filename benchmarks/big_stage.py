"""One stage of a large model, trained alone: tokens per second, MFU, peak memory, measured and planned.

    python benchmarks/big_stage.py --out benchmarks/results
    python benchmarks/big_stage.py --device cpu --model nano --stages 4 --context 64

The stage is the trainer's own: its replicas, its schedule's actions and its optimizer step, m micro-batches a
step. Its neighbours are made up and always ready, so nothing waits: what is measured is the stage.

`2bw` holds two versions of the weights, `1f1b` and `paci` one. Each is run without recomputation, with
selective and with full, in a process of its own, so that none measures what another has left; one that the
device has no room for is reported as such, and the others go on. A stage s of p keeps up to p - s
micro-batches in flight: --stage chooses how many.

Measured memory is the most that torch had allocated on the GPU in a segment, for whatever purpose; on a CPU
it is the tensors that the stage holds, without what is taken and given back within an action.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from frame import conditions, parser, publish, seconds_of
from torch import Tensor

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.costs.devices import find_device, peak_tflops
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.estimate import estimate
from asyncpp_cli.planner.layouts import RECOMPUTE, Variant, layout
from asyncpp_cli.planner.memory import OF_THE_DEVICE
from schedules import Program, analyze
from schedules.dependencies import POSTED_AHEAD, Place
from schedules.messages import Message
from stages.comm.collectives import Exchange, Reduction, SingleRankGroup
from stages.comm.reduction_rounds import ReductionPlan
from stages.comm.topology import Connection
from stages.config.run_config import RunConfig, changed, tokens_per_step
from stages.config.segments import segment_program
from stages.data.dataset import prepare
from stages.liveness.stop_signal import never
from stages.memory.measure import MemoryMeter
from stages.model.compiler import compiles_here
from stages.pipeline.build import Rank, build_ranks
from stages.pipeline.executor import drive
from stages.resolve.checks import ConfigError, check
from stages.resolve.facts import facts
from stages.shape.families import describe
from stages.shape.partition import cut_of
from stages.update.rank_stats import staleness_problem
from stages.weights.number_formats import dtypes

GB = 1e9
COLUMNS = (
    *("schedule", "versions", "in_flight", "recompute", "tokens_per_second", "quartiles", "mfu", "memory_gb"),
    *("planned_gb", "planned_over_measured", "why_not"),
)
"""None is what could not be measured; `tokens_per_second` is the median over the segments."""


Row = dict[str, Any]


class MadeUpNeighbours:
    """In the place of links to other processes: what is received is there at once, what is sent is let go.

    It has as many buffers as links between processes have, those that wait for what comes next included.

    Args:
        neighbours: of the stage, 1 or 2.
        shape: of every activation and gradient.
        dtype: likewise.
        device: likewise.
    """

    waits = True
    waited_for = None

    def __init__(
        self, *, neighbours: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._content = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        self._posted = [torch.empty_like(self._content) for _ in range(neighbours * POSTED_AHEAD)]
        self.most_message_bytes = sum(buffer.nbytes for buffer in self._posted)

    def connect(self) -> None:
        pass

    def begin(self, program: Program) -> None:
        pass

    def passed(self, place: Place) -> None:
        pass

    def send(self, message: Message, tensor: Tensor) -> None:
        pass

    def send_all(self, messages: Sequence[Message], tensor: Tensor) -> None:
        pass

    def arrived(self, message: Message) -> bool:
        return True

    def receive(self, message: Message) -> Tensor:
        return self._content.clone()

    def finish(self) -> None:
        pass


class MadeUpPipeline:
    """In the place of the group of a pipeline's ranks: the others bring what this one brings."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        return Exchange(ready=lambda: True, wait=lambda: None, take=lambda: [numbers] * self.size)

    def reduce_scatter(
        self, flat: Tensor, plan: ReductionPlan, *, early: bool, part: Tensor | None = None
    ) -> Reduction:
        raise NotImplementedError("gradients are added over data ranks, not along a pipeline")

    def broadcast(self, flat: Tensor, bounds: Sequence[int]) -> Exchange[None]:
        raise NotImplementedError("weights are spread over data ranks, not along a pipeline")


def config_of(options: argparse.Namespace, schedule: str, *, recompute: str) -> RunConfig:
    changes = [f"optimizer={options.optimizer}", *options.change]
    if options.context is not None:
        changes.append(f"data.context={options.context}")
    config = layout(
        base_of(options.model, changes).config,
        Variant(schedule),
        stages=options.stages,
        data=1,
        microbatches=options.microbatches or 2 * options.stages,
        size=options.microbatch_size,
        recompute=recompute,
    )
    return changed(
        config,
        {
            "train.steps": options.steps * (1 + options.segments),
            "train.eval_interval": options.steps,
            "train.checkpoint_interval": 0,
            "train.compile": options.compile,
            "site.device": options.device,
            "site.threads": options.threads,
        },
    )


def lone_rank(config: RunConfig, *, stage: int, device: torch.device) -> Rank:
    """The trainer's rank of one stage, without the others."""
    stages = config.parallel.stages
    links = MadeUpNeighbours(
        neighbours=(stage > 0) + (stage < stages - 1),
        shape=facts(config).activation_shape,
        dtype=dtypes(config).replica,
        device=device,
    )
    connection = Connection(
        rank=stage, links=links, pipeline=MadeUpPipeline(rank=stage, size=stages), data=SingleRankGroup()
    )
    (rank,) = build_ranks(
        facts(config),
        connections=[connection],
        corpus=prepare(config.data),
        device=device,
        on_step=lambda result: None,
        stop=never,
    )
    return rank


def measure(config: RunConfig, *, stage: int, device: torch.device, peak: float | None) -> Row:
    """Train one stage, segment after segment; the first warms up."""
    rank = lone_rank(config, stage=stage, device=device)
    meter = MemoryMeter(config, device=device)
    rates = []
    for first, steps in facts(config).segments():
        program = segment_program(config, first_step=first, steps=steps)
        meter.begin()
        # Its neighbours are always ready, so it never waits for another rank.
        seconds = seconds_of(partial(drive, [rank.executor.run(program)]), device=device.type)
        rates.append(steps * tokens_per_step(config) / seconds)
        if problem := staleness_problem([rank.executor.trace], analyze(program)):
            raise RuntimeError(problem)
    held = meter.measure(rank)
    lower, median, upper = statistics.quantiles(rates[1:], n=4, method="inclusive")
    measured = held.total if held.device is None else held.device.peak
    planned = planned_gb(config, stage, whole=held.device is not None)
    return {
        "schedule": config.schedule.name,
        "versions": held.versions[stage],
        "in_flight": held.in_flight[stage],
        "recompute": config.train.recompute,
        "tokens_per_second": median,
        "quartiles": (lower, upper),
        "mfu": None if peak is None else median * flops_of_stage(config, stage) / (peak * 1e12),
        "memory_gb": measured / GB,
        "planned_gb": planned,
        "planned_over_measured": planned * GB / measured,
        "why_not": "",
    }


def flops_of_stage(config: RunConfig, stage: int) -> float:
    """Floating-point operations of a token's forward and backward, recomputation left out."""
    cut, spec, context = cut_of(config)[stage], describe(config.model), config.data.context
    head = spec.head.training_flops(context=context) if cut.has_head else 0
    blocks = sum(spec.halves[half].training_flops(context=context) for half in cut.halves)
    return float(blocks + head)


def planned_gb(config: RunConfig, stage: int, *, whole: bool) -> float:
    """What the planner says that the stage takes; not `whole`: without what an action gives back."""
    costs = Roofline(find_device("h100", key="device"))  # sizes do not depend on it
    planned = estimate(config, costs, limit_gb=None)
    kinds = planned.memory[planned.rank_of_stage[stage]]
    if not whole:
        return (planned.stages[stage].total + kinds["messages"] + kinds["reduction"]) / GB
    return sum(size for kind, size in kinds.items() if kind not in OF_THE_DEVICE) / GB


def arm(options: argparse.Namespace, schedule: str, *, recompute: str, peak: float | None) -> Row:
    """One row; says why where there is nothing to measure."""
    config = config_of(options, schedule, recompute=recompute)
    planned = None
    try:
        check(config)
        planned = planned_gb(config, options.stage, whole=options.device == "cuda")
        return measure(config, stage=options.stage, device=torch.device(options.device), peak=peak)
    except ConfigError as error:
        why_not = str(error)
    except torch.OutOfMemoryError:
        why_not = "out of memory"
    return unmeasured(schedule, recompute, why_not=why_not) | {"planned_gb": planned}


def unmeasured(schedule: str, recompute: str, *, why_not: str) -> Row:
    return dict.fromkeys(COLUMNS) | {"schedule": schedule, "recompute": recompute, "why_not": why_not}


def arm_of_its_own(schedule: str, *, recompute: str) -> Row:
    """The row of an arm that a process of its own measures, with this one's options."""
    print(f"{schedule}, recomputation: {recompute}", file=sys.stderr, flush=True)
    own = ["--one", "--schedules", schedule, "--recompute", recompute]
    command = [sys.executable, __file__, *sys.argv[1:], *own]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode != 0:
        return unmeasured(schedule, recompute, why_not=f"ended with code {ended.returncode}")
    row: Row = json.loads(ended.stdout.splitlines()[-1])
    return row


def what(options: argparse.Namespace) -> str:
    """What is measured."""
    config = config_of(options, options.schedules.split(",")[0], recompute="none")
    cut = cut_of(config)[options.stage]
    ends = [name for name, held in (("embedding", cut.has_embedding), ("head", cut.has_head)) if held]
    schedule, train = config.schedule, config.train
    return (
        f"stage {options.stage} of {options.stages} of {options.model}: "
        f"{' and '.join([f'{cut.size:g} blocks', *ends])}; {schedule.microbatches} micro-batches "
        f"x {train.microbatch_size} x {config.data.context} tokens per step, {train.precision}"
        f"{', compiled' if compiles_here(config, device=options.device) else ''}"
    )


def parsed() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument(
        "change", nargs="*", metavar="KEY=VALUE", help="settings, as `asyncpp plan` has them"
    )
    arguments.add_argument("--model", default="10b")
    arguments.add_argument("--stages", type=int, default=8, help="of the pipeline")
    arguments.add_argument("--stage", type=int, help="that is measured; the one in the middle unless given")
    arguments.add_argument("--schedules", default="2bw,1f1b,paci", help="commas between")
    arguments.add_argument("--optimizer", default="muon")
    arguments.add_argument("--microbatches", type=int, help="per step; twice the stages unless given")
    arguments.add_argument("--microbatch-size", type=int, default=1, help="sequences")
    arguments.add_argument("--context", type=int, help="tokens in a sequence; the model's unless given")
    arguments.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compiled blocks; the device's default if not given",
    )
    arguments.add_argument("--steps", type=int, default=3, help="of a segment")
    arguments.add_argument(
        "--segments", type=int, default=3, help="measured, after one of warm-up; at least 2"
    )
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--threads", type=int, default=1, help="on a CPU")
    arguments.add_argument("--peak-tflops", type=float, help="of the device; known for many GPUs")
    arguments.add_argument("--recompute", default=",".join(RECOMPUTE), help="commas between")
    arguments.add_argument("--one", action="store_true", help="the first alone, in this process, as JSON")
    options = arguments.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda: there is no GPU here; accepted: --device cpu, with a small --model")
    if options.segments < 2:
        arguments.error(f"--segments {options.segments}: accepted: 2 or more")
    if options.stage is None:
        options.stage = options.stages // 2
    if not 0 <= options.stage < options.stages:
        arguments.error(f"--stage {options.stage}: accepted: 0 to {options.stages - 1}")
    return options


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    peak = options.peak_tflops
    if peak is None and options.device == "cuda":
        precision = config_of(options, "1f1b", recompute="none").train.precision
        peak = peak_tflops(torch.cuda.get_device_name(), precision)
    schedules, recomputations = options.schedules.split(","), options.recompute.split(",")
    if options.one:
        print(json.dumps(arm(options, schedules[0], recompute=recomputations[0], peak=peak)))
        return
    rows = [
        arm_of_its_own(schedule, recompute=recompute)
        for schedule in schedules
        for recompute in recomputations
    ]
    chip = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    where = {"what": what(options), "chip": chip, **conditions(options)}
    publish("big-stage", f"One stage of {options.model} by itself", rows, where, options)


if __name__ == "__main__":
    main()
