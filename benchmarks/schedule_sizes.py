"""How long schedules take to build, verify, analyze and simulate, and how much memory, up to 1024 stages.

    python benchmarks/schedule_sizes.py --out benchmarks/results

To hold: build, verify and analyze p = 64, m = 512 in 2 s; simulate p = 256, m = 1024, 4 steps in 20 s. Each
size is measured in a process of its own, so that the peak of memory is its own; times are processor time.
Torch's own lists of interleaved 1F1B, two chunks per rank, are made and checked like ours: it derives its
sends and receives meanwhile, as our verifier does.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from frame import conditions, parser, publish, seconds_of

T = TypeVar("T")

SCHEDULES = ("1f1b", "zero-bubble", "2bw")
SIZES = (*((size, size, 1) for size in (16, 32, 64, 128, 256, 512, 1024)), (64, 512, 1), (256, 1024, 4))
"""(stages, micro-batches, steps)."""
PEERS = ((8, 64), (16, 128), (32, 256))
"""(ranks, micro-batches) for the comparison with torch's own generator."""


def measure(name: str, stages: int, microbatches: int, steps: int) -> dict[str, Any]:
    """Seconds of each part, the number of actions, and the memory's peak (MiB)."""
    from schedules import analyze, build, verify
    from schedules.costs import uniform_costs
    from schedules.simulate import simulate

    before = peak_memory()
    began = time.process_time()
    program = build(name, stages=stages, microbatches=microbatches, steps=steps)
    row: dict[str, Any] = {"build_s": time.process_time() - began}
    parts: dict[str, Callable[[], object]] = {
        "verify_s": lambda: verify(program),
        "analyze_s": lambda: analyze(program),
        "simulate_s": lambda: simulate(program, uniform_costs(program)),
    }
    row |= {part: seconds_of(work, clock=time.process_time) for part, work in parts.items()}
    actions, memory = sum(map(len, program.actions)), peak_memory() - before
    return {**row, "actions": actions, "peak_mib": memory, "bytes_per_action": memory * 1024**2 / actions}


def measure_torch(ranks: int, microbatches: int) -> dict[str, Any]:
    """Seconds that torch and we take for the lists of interleaved 1F1B, and to check them."""
    from schedules import build, verify
    from schedules.io.torch_lists import from_torch

    from_torch("GPipe", stages=1, microbatches=1, chunks=1, steps=1)
    sizes = {"stages": ranks, "microbatches": microbatches, "chunks": 2, "steps": 1}
    start = time.process_time()
    theirs = from_torch("Interleaved1F1B", **sizes)
    middle = time.process_time()
    verify(theirs)
    checked = time.process_time()
    ours = build("interleaved-1f1b", **sizes)
    verify(ours)
    end = time.process_time()
    assert ours.actions == theirs.actions
    # from_torch verifies too; that is ours, and is taken off again.
    return {"torch_s": middle - start - (checked - middle), "ours_s": end - checked}


def peak_memory() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(work: Callable[[], T]) -> T:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work).result()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--most", type=int, default=1024, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    rows, peers = [], []
    for stages, microbatches, steps in SIZES:
        for name in SCHEDULES if microbatches <= options.most else ():
            size = {"schedule": name, "stages": stages, "microbatches": microbatches, "steps": steps}
            rows.append(size | in_own_process(partial(measure, name, stages, microbatches, steps)))
            print(rows[-1], file=sys.stderr)
    for ranks, microbatches in PEERS:
        if microbatches <= options.most:
            size = {"ranks": ranks, "microbatches": microbatches}
            peers.append(size | in_own_process(partial(measure_torch, ranks, microbatches)))
    where = conditions(options, interleaved_1f1b=peers)
    publish("schedule-sizes", "Schedules: time and memory against size", rows, where, options)


if __name__ == "__main__":
    main()
