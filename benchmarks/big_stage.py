"""One stage of a large model, trained alone: tokens per second, MFU, peak memory, measured and planned.

    python benchmarks/big_stage.py --out benchmarks/results
    python benchmarks/big_stage.py --device cpu --model nano --stages 4 --context 64
    python benchmarks/big_stage.py --parts --model 7b --microbatch-size 2 --out benchmarks/results

The stage is the trainer's own: its replicas, its schedule's actions and its optimizer step, m micro-batches a
step. Its neighbours are made up and always ready, so nothing waits: what is measured is the stage.

`2bw` holds two versions of the weights, `1f1b` and `paci` one. Each is run without recomputation, with
selective and with full; one that the device has no room for is reported as such, and the others go on. A
stage s of p keeps up to p - s micro-batches in flight: --stage chooses how many.

Measured memory is the most that torch had allocated on the GPU in a segment, for whatever purpose; on a CPU
it is the tensors that the stage holds, without what is taken and given back within an action.

With --parts the parts of a block, the optimizer step and the head are measured one by one, beside the times
that the planner reckons; --out then writes the file that docs/performance.md takes them from (`make docs`).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from block_parts import print_parts
from dated import write_dated
from lone_stage import MadeUpNeighbours, MadeUpPipeline

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.devices import find_device, peak_tflops
from asyncpp_cli.planner.estimate import OF_THE_DEVICE, estimate
from asyncpp_cli.planner.layouts import RECOMPUTE, layout
from asyncpp_cli.planner.roofline import Roofline
from schedules import analyze
from stages.comm.collectives import SingleRankGroup
from stages.comm.topology import Connection
from stages.compile_rule import compiles_here
from stages.config import RunConfig, tokens_per_step
from stages.data.dataset import prepare
from stages.liveness.stop_signal import never
from stages.memory.measure import MemoryMeter
from stages.model.families.catalogue import describe
from stages.model.partition import cut_of
from stages.pipeline.build import Rank, activation_shape, build_ranks, dtypes, segment_lengths
from stages.pipeline.rank_stats import staleness_problem
from stages.pipeline.segments import segment_program
from stages.validation import ConfigError, check

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm; None is what could not be measured."""

    schedule: str
    recompute: str
    versions: int | None
    in_flight: int | None
    tokens_per_second: float | None
    """Median over the segments."""
    quartiles: tuple[float, float] | None
    mfu: float | None
    memory_gb: float | None
    planned_gb: float | None
    why_not: str


def config_of(options: argparse.Namespace, schedule: str, *, recompute: str) -> RunConfig:
    changes = [f"optimizer={options.optimizer}", *options.change]
    if options.context is not None:
        changes.append(f"data.context={options.context}")
    config = layout(
        base_of(options.model, changes).config,
        schedule,
        stages=options.stages,
        data=1,
        microbatches=options.microbatches or 2 * options.stages,
        size=options.microbatch_size,
        recompute=recompute,
    )
    config.train.steps = options.steps * (1 + options.segments)
    config.train.eval_interval = options.steps
    config.train.checkpoint_interval = 0
    config.train.compile = options.compile
    config.site.device = options.device
    config.site.threads = options.threads
    return config


def lone_rank(config: RunConfig, *, stage: int, device: torch.device) -> Rank:
    """The trainer's rank of one stage, without the others."""
    stages = config.parallel.stages
    links = MadeUpNeighbours(
        neighbours=(stage > 0) + (stage < stages - 1),
        shape=activation_shape(config),
        dtype=dtypes(config).replica,
        device=device,
    )
    connection = Connection(
        rank=stage, links=links, pipeline=MadeUpPipeline(rank=stage, size=stages), data=SingleRankGroup()
    )
    (rank,) = build_ranks(
        config,
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
    for first, steps in segment_lengths(config):
        program = segment_program(config, first_step=first, steps=steps)
        meter.begin()
        wait_for(device)
        started = time.perf_counter()
        for _ in rank.executor.run(program):
            raise RuntimeError("a stage waits, and its neighbours are always ready")
        wait_for(device)
        rates.append(steps * tokens_per_step(config) / (time.perf_counter() - started))
        if problem := staleness_problem([rank.executor.trace], analyze(program)):
            raise RuntimeError(problem)
    held = meter.measure(rank)
    lower, median, upper = statistics.quantiles(rates[1:], n=4, method="inclusive")
    measured = held.total if held.device is None else held.device.peak
    return Row(
        schedule=config.schedule.name,
        recompute=config.train.recompute,
        versions=held.versions[stage],
        in_flight=held.in_flight[stage],
        tokens_per_second=median,
        quartiles=(lower, upper),
        mfu=None if peak is None else median * flops_of_stage(config, stage) / (peak * 1e12),
        memory_gb=measured / GB,
        planned_gb=planned_gb(config, stage, whole=held.device is not None),
        why_not="",
    )


def flops_of_stage(config: RunConfig, stage: int) -> float:
    """Floating-point operations of a token's forward and backward, recomputation left out."""
    cut, spec, context = cut_of(config)[stage], describe(config.model), config.data.context
    head = spec.head.training_flops(context=context) if cut.has_head else 0
    blocks = sum(spec.blocks[block].training_flops(context=context) for block in cut.blocks)
    return float(blocks + head)


def planned_gb(config: RunConfig, stage: int, *, whole: bool) -> float:
    """What the planner says that the stage takes; not `whole`: without what an action gives back."""
    costs = Roofline(find_device("h100", key="device"))  # sizes do not depend on it
    kinds = estimate(config, costs, limit_gb=None).memory[stage]
    left_out = OF_THE_DEVICE if whole else (*OF_THE_DEVICE, "temporary")
    return sum(size for kind, size in kinds.items() if kind not in left_out) / GB


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    nothing = dict.fromkeys(("versions", "in_flight", "tokens_per_second", "quartiles", "mfu", "memory_gb"))
    return Row(schedule=schedule, recompute=recompute, planned_gb=planned, why_not=why_not, **nothing)


def markdown(rows: list[Row]) -> str:
    lines = [
        "| schedule | versions | in flight | recomputation | tokens/s | quartiles | MFU | measured GB "
        "| planned GB | planned / measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.schedule, _count(row.versions), _count(row.in_flight), row.recompute]
        if row.tokens_per_second is None or row.quartiles is None:
            cells += [row.why_not, "", "", "", "" if row.planned_gb is None else f"{row.planned_gb:.3g}", ""]
        else:
            assert row.memory_gb is not None
            assert row.planned_gb is not None
            cells += [f"{row.tokens_per_second:,.0f}", " to ".join(f"{rate:,.0f}" for rate in row.quartiles)]
            cells += ["-" if row.mfu is None else f"{row.mfu:.1%}", f"{row.memory_gb:.3g}"]
            cells += [f"{row.planned_gb:.3g}", f"{row.planned_gb / row.memory_gb:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _count(number: int | None) -> str:
    return "" if number is None else str(number)


def conditions(options: argparse.Namespace) -> str:
    """What was measured, on what."""
    config = config_of(options, options.schedules.split(",")[0], recompute="none")
    cut = cut_of(config)[options.stage]
    ends = [name for name, held in (("embedding", cut.has_embedding), ("head", cut.has_head)) if held]
    chip = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {options.threads} thread(s)"
    schedule, train = config.schedule, config.train
    compiled = compiles_here(config, device=options.device)
    return (
        f"Stage {options.stage} of {options.stages} of {options.model}: {len(cut.blocks)} blocks"
        + "".join(f" and {name}" for name in ends)
        + f"; {schedule.microbatches} micro-batches x {train.microbatch_size} x {config.data.context} tokens "
        f"per step, {train.precision}{', compiled' if compiled else ''}, {config.optimizer.name}; "
        f"{options.segments} segments of {options.steps} steps after one of warm-up. "
        f"{chip}; torch {torch.__version__}, Python {platform.python_version()}."
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("change", nargs="*", metavar="KEY=VALUE", help="settings, as `asyncpp plan` has them")
    parser.add_argument("--model", default="10b")
    parser.add_argument("--stages", type=int, default=8, help="of the pipeline")
    parser.add_argument("--stage", type=int, help="that is measured; the one in the middle unless given")
    parser.add_argument("--schedules", default="2bw,1f1b,paci", help="commas between")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--microbatches", type=int, help="per step; twice the stages unless given")
    parser.add_argument("--microbatch-size", type=int, default=1, help="sequences")
    parser.add_argument("--context", type=int, help="tokens in a sequence; the model's unless given")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compiled blocks; the device's default if not given",
    )
    parser.add_argument("--parts", action="store_true", help="the parts of a block instead, one by one")
    parser.add_argument("--repeats", type=int, default=10, help="of each part")
    parser.add_argument("--steps", type=int, default=3, help="of a segment")
    parser.add_argument("--segments", type=int, default=3, help="measured, after one of warm-up; at least 2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--peak-tflops", type=float, help="of the device; known for many GPUs")
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    parser.add_argument("--out", type=Path, help="folder for a dated Markdown table")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; accepted: --device cpu, with a small --model")
    if options.segments < 2:
        parser.error(f"--segments {options.segments}: accepted: 2 or more")
    if options.stage is None:
        options.stage = options.stages // 2
    if not 0 <= options.stage < options.stages:
        parser.error(f"--stage {options.stage}: accepted: 0 to {options.stages - 1}")
    return options


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    if options.parts:
        config = config_of(options, "1f1b", recompute="none")
        # A step's share in a micro-batch depends on their number: that of docs/performance.md.
        config.schedule.microbatches = options.microbatches or 16
        if config.model.experts:
            sys.exit(f"--parts --model {options.model}: accepted: a dense model")
        print_parts(config, device=torch.device(options.device), repeats=options.repeats, out=options.out)
        return
    peak = options.peak_tflops
    if peak is None and options.device == "cuda":
        precision = config_of(options, "1f1b", recompute="none").train.precision
        peak = peak_tflops(torch.cuda.get_device_name(), precision)
    rows = []
    for schedule in options.schedules.split(","):
        for recompute in RECOMPUTE:
            print(f"{schedule}, recomputation: {recompute}", file=sys.stderr, flush=True)
            rows.append(arm(options, schedule, recompute=recompute, peak=peak))
            gc.collect()  # of the arm before nothing may be left in memory
    where = conditions(options)
    if options.json:
        print(json.dumps({"conditions": where, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"{where}\n\n{markdown(rows)}")
    if options.out:
        command = f"```sh\npython benchmarks/big_stage.py {' '.join(sys.argv[1:])}\n```\n"
        text = f"# One stage of {options.model} by itself\n\n{where}\n\n{markdown(rows)}\n{command}"
        write_dated(options.out, "big-stage", text)


if __name__ == "__main__":
    main()
