"""How long schedules take to build, verify, analyze and simulate, and how much memory, up to 1024 stages.

    python benchmarks/schedule_sizes.py --out benchmarks/results

Writes `schedule-sizes-DATE.md`. Each size is measured in a process of its own, so that the peak of memory is
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dated import today, write_dated

SCHEDULES = ("1f1b", "zero-bubble", "2bw")
SQUARE = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of stages; as many micro-batches, one step."""
ISSUE = (("p = 64, m = 512, 1 step", 64, 512, 1), ("p = 256, m = 1024, 4 steps", 256, 1024, 4))
PARTS = ("build", "verify", "analyze", "simulate")
PEERS = ((8, 64), (16, 128), (32, 256))
"""(ranks, micro-batches) for the comparison with torch's own generator, two chunks per rank."""


def measure(name: str, stages: int, microbatches: int, steps: int) -> dict[str, Any]:
    """Processor seconds of each part, the number of actions, and the memory's peak (MiB)."""
    from schedules import analyze, build, verify
    from schedules.costs import uniform_costs
    from schedules.simulate import simulate

    before = peak_memory()
    marks = [time.process_time()]
    chunks = 2 if name == "interleaved-1f1b" else 1
    program = build(name, stages=stages, microbatches=microbatches, steps=steps, chunks=chunks)
    marks.append(time.process_time())
    verify(program)
    marks.append(time.process_time())
    analyze(program)
    marks.append(time.process_time())
    simulate(program, uniform_costs(program))
    marks.append(time.process_time())
    return {
        **{part: end - start for part, start, end in zip(PARTS, marks, marks[1:], strict=False)},
        "actions": sum(len(actions) for actions in program.actions),
        "memory": peak_memory() - before,
    }


def measure_torch(ranks: int, microbatches: int) -> dict[str, float]:
    """Processor seconds that torch and we take for the lists of interleaved 1F1B, and to check them."""
    from schedules import build, verify
    from schedules.io.torch_lists import from_torch

    from_torch("GPipe", stages=1, microbatches=1, chunks=1, steps=1)
    start = time.process_time()
    theirs = from_torch("Interleaved1F1B", stages=ranks, microbatches=microbatches, chunks=2, steps=1)
    middle = time.process_time()
    verify(theirs)
    checked = time.process_time()
    ours = build("interleaved-1f1b", stages=ranks, microbatches=microbatches, steps=1, chunks=2)
    verify(ours)
    end = time.process_time()
    assert ours.actions == theirs.actions
    # from_torch verifies too; that is ours, and is taken off again.
    return {"torch": middle - start - (checked - middle), "ours": end - checked}


def peak_memory() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(*words: object) -> dict[str, Any]:
    """What this script says when called with `words`."""
    command = [sys.executable, __file__, "--one", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def report(
    rows: list[dict[str, Any]], asked: list[dict[str, Any]], peers: list[dict[str, Any]], date: str
) -> str:
    """The result file."""

    def cells(row: dict[str, Any]) -> list[str]:
        return [
            *(f"{row[part]:.2f}" for part in PARTS),
            f"{row['actions']:,}",
            f"{row['memory']:.0f}",
            f"{1024**2 * row['memory'] / row['actions']:.0f}",
        ]

    header = [*(f"{part} s" for part in PARTS), "actions", "peak MiB", "bytes per action"]
    largest = [row for row in rows if row["stages"] == max(SQUARE)]
    return f"""# Schedules: time and memory against size, {date}

Conditions: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, one used; CPython
{platform.python_version()} on {platform.system()}; seconds of processor time, with other work on the machine.
One run each, in a process of its own. Made by `python benchmarks/schedule_sizes.py`.

## Sizes asked for

{table(["size", "schedule", *header], [[row["size"], row["name"], *cells(row)] for row in asked])}

Bounds: build, verify and analyze p = 64, m = 512 in 2 s; simulate p = 256, m = 1024, 4 steps in 20 s.

## p = m = {max(SQUARE)}, one step

{table(["schedule", *header], [[row["name"], *cells(row)] for row in largest])}

## Beside torch.distributed.pipelining

Interleaved 1F1B, two chunks per rank, lists checked on both sides (torch derives its sends and receives
meanwhile, as our verifier does).

{
        table(
            ["ranks", "micro-batches", "torch s", "ours s"],
            [
                [str(r["ranks"]), str(r["microbatches"]), f"{r['torch']:.2f}", f"{r['ours']:.2f}"]
                for r in peers
            ],
        )
    }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of schedules against their size.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="Folder to write to."
    )
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, *numbers = arguments.one
        numbers = [int(number) for number in numbers]
        print(json.dumps(measure_torch(*numbers) if name == "torch" else measure(name, *numbers)))
        return
    rows = []
    for stages in SQUARE:
        for name in SCHEDULES:
            rows.append({"name": name, "stages": stages, **in_own_process(name, stages, stages, 1)})
            print(rows[-1], file=sys.stderr)
    asked = [
        {"size": size, "name": name, **in_own_process(name, stages, microbatches, steps)}
        for size, stages, microbatches, steps in ISSUE
        for name in SCHEDULES
    ]
    peers = [
        {"ranks": ranks, "microbatches": microbatches, **in_own_process("torch", ranks, microbatches)}
        for ranks, microbatches in PEERS
    ]
    write_dated(arguments.out, "schedule-sizes", report(rows, asked, peers, today()))


if __name__ == "__main__":
    main()
