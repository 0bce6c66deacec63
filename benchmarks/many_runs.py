"""How long the commands take on an experiment of a thousand runs.

    python benchmarks/many_runs.py --json

`sweep` renders them, every cell checked: schedules, depths, optimizers and learning rates differ. Then one
real run is trained, and what it has written is copied into every folder, so that `status` and `launch` find a
thousand completed runs; and with its last files taken away and this process for a rank, a thousand that go
on. Every figure is the lowest of some rounds: wall-clock time, and the CPU time (user and system) of the
command and its children, which a busy machine disturbs less.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from frame import conditions, parser, publish, seconds_of

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
CELLS_PER_SEED = 200


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=1000, help="a multiple of 200")
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    if options.runs < 1 or options.runs % CELLS_PER_SEED:
        arguments.error(f"--runs: must be a multiple of {CELLS_PER_SEED}")
    with tempfile.TemporaryDirectory(prefix="asyncpp-many-runs-") as made:
        rows = measure(Path(made), runs=options.runs, rounds=options.rounds)
    publish("many-runs", f"Commands on {options.runs:,} runs", rows, conditions(options), options)


def measure(folder: Path, *, runs: int, rounds: int) -> list[dict[str, object]]:
    """Seconds of every command."""
    template, experiment = folder / "many.yaml", folder / "many"
    template.write_text(TEMPLATE.format(seeds=list(range(runs // CELLS_PER_SEED))))
    rows: list[dict[str, object]] = []

    def time_command(what: str, *words: object, before: Callable[[], None] = lambda: None) -> None:
        times = []
        for _ in range(rounds):
            before()
            used = cpu_of_children()
            wall = seconds_of(lambda: asyncpp(*words))
            times.append((wall, cpu_of_children() - used))
        walls, cpus = zip(*times, strict=True)
        rows.append({"command": what, "wall_s": min(walls), "cpu_s": min(cpus)})

    time_command("--help", "--help")
    sweep = ("sweep", template, "--out", experiment)
    time_command("sweep", *sweep, before=lambda: shutil.rmtree(experiment, ignore_errors=True))
    time_command("sweep again", *sweep)
    time_command("status, pending", "status", experiment)
    first, *others = open_experiment(experiment).runs
    asyncpp("train", first.folder, "--replay")
    for run in others:
        copy(first, run)
    time_command("status, completed", "status", experiment)
    time_command("status --json, completed", "status", experiment, "--json")
    time_command("launch, all completed", "launch", experiment)
    for run in (first, *others):
        go_on(run)
    time_command("status, running", "status", experiment)
    return rows


def asyncpp(*words: object) -> None:
    """Run a command of this tree."""
    command = [sys.executable, "-P", "-m", "asyncpp_cli", *map(str, words)]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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


if __name__ == "__main__":
    main()
