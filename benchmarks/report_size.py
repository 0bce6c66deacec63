"""How long a report of many long runs takes, how much memory, and how large its page is.

    python benchmarks/report_size.py [--runs 1000] [--rows 10000] [--json]

Writes synthetic run folders (files as a run writes them, with invented numbers) into a temporary folder, and
reports on them with each of `--formats`, each in a process of its own, so that the peak of memory is its own.
`--keep DIR` makes the folders there and leaves them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

SCHEDULES = (("1f1b", 0.0), ("2bw", 0.0), ("2bw", 1.0))
OPTIMIZERS = ("adamw", "muon", "nadamw", "soap")
SEEDS = 3
MODEL = {"name": "nano", "layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "mlp_width": 384}
STAGES = 4
MICROBATCHES = 8
TOKENS = 2048
EVALUATIONS = 50

MEASURE = """
import json, resource, sys, time
sys.argv = sys.argv[1:]
from asyncpp_cli.main import main
begin = time.perf_counter()
try:
    main()
except SystemExit as ended:
    code = ended.code
else:
    code = 0
used = resource.getrusage(resource.RUSAGE_SELF)
measured = [code, time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]
print(json.dumps(measured), file=sys.stderr)
"""


def write_experiment(folder: Path, *, runs: int, rows: int) -> int:
    """Make an experiment with completed runs; returns the bytes of their metrics."""
    from asyncpp_cli.experiment.config_file import config_text
    from asyncpp_cli.experiment.settings import assign
    from asyncpp_cli.runs.experiment_folder import Cell, Experiment, write_experiment
    from asyncpp_cli.runs.status import State, Status
    from stages.config import RunConfig

    cells, size = [], 0
    for place in range(runs):
        group, seed = divmod(place, SEEDS)
        schedule, coefficient = SCHEDULES[group % len(SCHEDULES)]
        optimizer = OPTIMIZERS[group // len(SCHEDULES) % len(OPTIMIZERS)]
        rate = 1e-3 * (1 + group // (len(SCHEDULES) * len(OPTIMIZERS)))
        config = RunConfig()
        settings = {f"model.{key}": value for key, value in MODEL.items()} | {
            "schedule.name": schedule,
            "schedule.microbatches": MICROBATCHES,
            "optimizer.name": optimizer,
            "optimizer.lr": rate,
            "error_feedback.coefficient": coefficient,
            "parallel.stages": STAGES,
            "train.steps": rows,
            "seed": seed,
        }
        assign(config, settings)
        axes = {
            "schedule": schedule,
            "optimizer": optimizer,
            "error_feedback": coefficient,
            "model": "nano",
            "seed": seed,
            "optimizer.lr": rate,
        }
        cell = Cell(
            id=f"{schedule}-{optimizer}-ef{coefficient:g}-nano-s{seed}-lr={rate:g}-{place:08x}", axes=axes
        )
        cells.append(cell)
        run = Experiment(folder=folder, name="", template="", cells=()).run(cell.id)
        run.folder.mkdir(parents=True)
        run.config_file.write_text(config_text(config))
        run.write_status(Status(state=State.COMPLETED, attempt=1, step=rows, steps=rows))
        delayed = schedule != "1f1b"
        end = (
            1.6
            + 0.05 * (optimizer == "adamw")
            + delayed * (0.06 - 0.04 * coefficient)
            + abs(rate - 3e-3) * 20
        )
        with run.metrics_file.open("w") as file:
            for row in metrics(place, rows=rows, end=end, delayed=delayed):
                file.write(json.dumps(row) + "\n")
        run.write_timeline(timeline(schedule, rows=rows))
        size += run.metrics_file.stat().st_size
    write_experiment(Experiment(folder=folder, name="report-size", template="none", cells=tuple(cells)))
    return size


@lru_cache
def timeline(schedule: str, *, rows: int) -> dict[str, Any]:
    """As a run's ranks write it: the last steps before the last drain."""
    from schedules import build
    from schedules.costs import uniform_costs
    from schedules.simulate import simulate
    from stages.pipeline.timeline import STEPS, kept_actions

    steps = min(rows, 2 * STEPS)
    program = build(schedule, stages=STAGES, microbatches=MICROBATCHES, steps=steps, first_step=rows - steps)
    played = simulate(program, uniform_costs(program, forward=3e-3, backward=6e-3, latency=1e-3))
    ranks = []
    for actions, starts, ends in zip(program.actions, played.starts, played.ends, strict=True):
        kept = range(len(actions) - kept_actions(len(actions), steps=steps), len(actions))
        ranks.append([[str(actions[i]), round(starts[i] * 1e6), round(ends[i] * 1e6)] for i in kept])
    every = max(1, rows // EVALUATIONS)
    return {"first_step": rows - every, "steps": every, "steps_kept": float(STEPS), "ranks": ranks}


def metrics(seed: int, *, rows: int, end: float, delayed: bool) -> Iterator[dict[str, Any]]:
    """Rows as a run on four ranks writes them."""
    generator = np.random.default_rng(seed)
    end += generator.normal(0, 0.004)
    busy = 0.96 if delayed else 0.72
    yield {
        "kind": "start",
        "step": 0,
        "updates": 0,
        "time": 0.0,
        "torch": "2.13.0",
        "python": platform.python_version(),
        "host": "node7",
        "device": "cpu",
        "threads": 1,
        "replayed": False,
        "parameters": 853_120,
        "active_parameters": 853_120,
        "stage_parameters": [213_280] * STAGES,
        "microbatches": MICROBATCHES,
        "microbatch_size": 2,
        "context": 128,
        "tokens_per_step": TOKENS,
        "bytes_per_token": 1.0,
        "unigram_bits_per_byte": 4.5,
        "corpus_sha256": "0" * 64,
        "attempt": 1,
        "asyncpp": "0.1.0",
        "commit": None,
    }
    steps = np.arange(1, rows + 1)
    losses = end + (5.5 - end) * np.exp(-steps / (rows / 12)) + generator.normal(0, 0.05, rows)
    norms = generator.lognormal(0, 0.3, rows)
    seconds = steps * (0.1 if delayed else 0.14)
    every = max(1, rows // EVALUATIONS)
    for step, loss, norm, now in zip(
        steps.tolist(), losses.tolist(), norms.tolist(), seconds.tolist(), strict=True
    ):
        yield {
            "kind": "step",
            "step": step,
            "tokens": step * TOKENS,
            "train_loss": loss,
            "lr": 1e-3 * step / rows,
            "grad_norm": norm,
            "skipped": False,
            "seconds": now,
        }
        if step % every == 0:
            yield {
                "kind": "segment",
                "first_step": step - every,
                "steps": every,
                "steady_tokens": (every - 1) * TOKENS,
                "steady_seconds": (every - 1) * (0.1 if delayed else 0.14),
                "busy": [busy + generator.normal(0, 0.01) for _ in range(STAGES)],
                "action_seconds": {
                    "F": [0.003, 0.0029, 0.0031, 0.0035],
                    "B": [0.006, 0.0058, 0.006, 0.0072],
                    "U": [0.002] * STAGES,
                },
                "delay_min": [0] * STAGES,
                "delay_max": [int(delayed)] * STAGES,
                "mismatch_max": [0] * STAGES,
                "seconds": now,
            }
            yield {
                "kind": "eval",
                "step": step,
                "tokens": step * TOKENS,
                "val_loss": loss + 0.01,
                "seconds": now,
            }
    yield {"kind": "end", "step": rows, "seconds": seconds[-1].item(), "weights_sha256": "0" * 64}


def report(folder: Path, output_format: str) -> dict[str, Any]:
    """Seconds (wall and processor), peak memory (MiB) and size (bytes) of a report of that format."""
    out = folder.parent / f"report.{output_format}"
    command = [
        sys.executable,
        "-c",
        MEASURE,
        "asyncpp",
        "report",
        str(folder),
        "--format",
        output_format,
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, wall, processor, memory = json.loads(done.stderr.splitlines()[-1])
    if code:
        raise SystemExit(done.stderr)
    beside = out.with_suffix(".steps.parquet")
    return {
        "format": output_format,
        "seconds": wall,
        "processor_seconds": processor,
        "peak_mib": memory,
        "bytes": out.stat().st_size,
        "parquet_bytes": beside.stat().st_size if output_format == "html" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--formats", default="table,json,html", help="separated by commas")
    parser.add_argument("--keep", type=Path, help="make the folders here, or take those that are there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="report-size-") as temporary:
        folder = (asked.keep or Path(temporary)) / "experiment"
        begin = time.perf_counter()
        size = None if folder.exists() else write_experiment(folder, runs=asked.runs, rows=asked.rows)
        print(
            f"wrote {asked.runs} runs of {asked.rows} rows in {time.perf_counter() - begin:.0f} s",
            file=sys.stderr,
        )
        measured = [report(folder, name) for name in asked.formats.split(",")]
    if asked.json:
        print(
            json.dumps({"runs": asked.runs, "rows": asked.rows, "metrics_bytes": size, "reports": measured})
        )
        return
    print(
        f"{asked.runs} runs x {asked.rows} rows, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print(
        "| format | seconds | processor seconds | peak MiB | file MB | Parquet MB |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    for one in measured:
        beside = "" if one["parquet_bytes"] is None else f"{one['parquet_bytes'] / 1e6:.0f}"
        print(
            f"| {one['format']} | {one['seconds']:.1f} | {one['processor_seconds']:.1f} "
            f"| {one['peak_mib']:.0f} | {one['bytes'] / 1e6:.2f} | {beside} |"
        )


if __name__ == "__main__":
    main()
