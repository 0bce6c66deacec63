"""How long the commands take on an experiment of a thousand runs.

    python benchmarks/many_runs.py --json

`sweep` renders them, every cell checked: schedules, depths, optimizers and learning rates differ. Then one
real run is trained, and what it has written is copied into every folder, so that `status` and `launch` find a
thousand completed runs; and with its last files taken away and this process for a rank, a thousand that go
on. Every figure is the lowest of some rounds: wall-clock time, and the CPU time (user and system) of the
command and its children, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = """\
matrix:
  schedule: [1f1b, 2bw, gpipe, zero-bubble]
  optimizer: [adamw, muon]
  parallel.stages: [2, 3, 4, 6, 8]
  optimizer.lr: [0.001, 0.002, 0.003, 0.004, 0.005]
  seed: {seeds}
model: deep
schedule: {{microbatches: 8}}
train: {{steps: 2, microbatch_size: 1, eval_microbatches: 1}}
data: {{context: 16}}
"""
CELLS_A_SEED = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="a multiple of 200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    arguments = parser.parse_args()
    if arguments.runs < 1 or arguments.runs % CELLS_A_SEED:
        parser.error(f"--runs: must be a multiple of {CELLS_A_SEED}")
    with tempfile.TemporaryDirectory(prefix="asyncpp-many-runs-") as made:
        figures = measure(Path(made), runs=arguments.runs, rounds=arguments.rounds)
    result = {"runs": arguments.runs, "commands": figures, "conditions": conditions(arguments.rounds)}
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, seconds in figures.items():
        print(f"{name:<28} {seconds['wall']:6.2f} s  {seconds['cpu']:6.2f} s of CPU time")


def measure(folder: Path, *, runs: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of every command, by what it does."""
    template = folder / "many.yaml"
    template.write_text(TEMPLATE.format(seeds=list(range(runs // CELLS_A_SEED))))
    experiment = folder / "many"
    figures = {"--help": timed(["--help"], rounds=rounds)}
    sweep = ["sweep", str(template), "--out", str(experiment)]
    figures["sweep"] = timed(
        sweep, rounds=rounds, before=lambda: shutil.rmtree(experiment, ignore_errors=True)
    )
    figures["sweep again"] = timed(sweep, rounds=rounds)
    figures["status, pending"] = timed(["status", str(experiment)], rounds=rounds)
    found = open_experiment(experiment).runs
    train(found[0], experiment)
    for run in found[1:]:
        copy(found[0], run)
    figures["status, completed"] = timed(["status", str(experiment)], rounds=rounds)
    figures["status --json, completed"] = timed(["status", str(experiment), "--json"], rounds=rounds)
    figures["launch, all completed"] = timed(["launch", str(experiment)], rounds=rounds)
    for run in found:
        go_on(run)
    figures["status, running"] = timed(["status", str(experiment)], rounds=rounds)
    return figures


def timed(
    arguments: list[str], *, rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The lowest wall-clock and CPU seconds of `asyncpp` with these arguments."""
    walls, cpus = [], []
    for _ in range(rounds):
        before()
        used, began = cpu_of_children(), time.perf_counter()
        command = [sys.executable, "-P", "-m", "asyncpp_cli", *arguments]
        subprocess.run(command, check=True, capture_output=True, env=environment())
        walls.append(time.perf_counter() - began)
        cpus.append(cpu_of_children() - used)
    return {"wall": round(min(walls), 3), "cpu": round(min(cpus), 3)}


def environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": str(ROOT)}


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train(run: Run, experiment: Path) -> None:
    """Train one run, in one process."""
    command = [sys.executable, "-P", "-m", "asyncpp_cli", "train", str(run.folder), "--replay"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode != 0:
        sys.exit(f"the run {run.id} of {experiment} failed: {done.stderr}")


def copy(source: Run, run: Run) -> None:
    """Give a run what another has written."""
    for entry in source.folder.iterdir():
        if entry == source.config_file:
            continue
        if entry.is_dir():
            # The content of checkpoints is not read here, and a thousand of them would fill a disk.
            shutil.copytree(entry, run.folder / entry.name, copy_function=os.link)
        else:
            shutil.copy(entry, run.folder)


def go_on(run: Run) -> None:
    """Make a completed run one that goes on, this process being its rank."""
    attempt = Attempt(run, 1)
    for name in ("rank-0.end.json", "outcome.json"):
        (attempt.folder / name).unlink()
    # Their files are links to one: replaced, not written into.
    attempt.record_start(0, this_process())
    status = json.loads(run.status_file.read_text()) | {"state": "running"}
    run.status_file.write_text(json.dumps(status))


def conditions(rounds: int) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 1) for load in os.getloadavg()],
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
