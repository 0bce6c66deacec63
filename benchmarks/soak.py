"""Runs that are killed again and again, launched again, and held against runs that nobody disturbed.

    python benchmarks/soak.py --kills 100 --json

Small runs of two processes (1f1b, 2bw, 2bw with error feedback, pipedream, paci): a random rank is killed
with SIGKILL at a random time (while it starts, trains or saves), and the run is started again, until it is
complete. Then its rows and its weights must be those of the undisturbed run, no checkpoint may be lost, and
none may be damaged. The processes are `asyncpp train`, as torchrun would start them, but forked from one that
has loaded torch, so that a hundred kills take minutes. The exit code is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_attempt import LONGEST_ATTEMPT, Attempt, forkserver

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from stages.checkpoint import files as checkpoint_files

RANKS = 2
SAVED_EVERY = 12
FIVE = """
zip:
  schedule: [1f1b, 2bw, 2bw, pipedream, paci]
  error_feedback: [false, false, true, false, false]
  optimizer: [muon, adamw, muon, muon, adamw]
  train.clip: [global, global, global, stage, stage]
"""
EVERY = """
matrix:
  schedule: [gpipe, 1f1b, interleaved-1f1b, zero-bubble, 2bw, pipedream, pipedream-unstashed, paci]
  optimizer: [adamw, muon]
  error_feedback: [false, true]
exclude:
  - {schedule: [gpipe, 1f1b, interleaved-1f1b, zero-bubble], error_feedback: true}
overrides:
  - {when: {schedule: interleaved-1f1b}, set: {schedule.chunks: 2}}
  - {when: {schedule: [pipedream, pipedream-unstashed, paci]}, set: {train.clip: stage}}
"""
COMMON = f"""
model: micro
data: {{context: 16}}
schedule: {{microbatches: 2}}
parallel: {{stages: {RANKS}}}
train: {{microbatch_size: 1, eval_interval: 24, eval_microbatches: 2, checkpoint_interval: {SAVED_EVERY}}}
site: {{device: cpu, timeout: 60}}
"""
CLOCK = {
    "time",
    "seconds",
    "steady_seconds",
    "steady_tokens",
    "busy",
    "action_seconds",
    "load_per_core",
    "checksum",
}
OF_PROCESSES = {"memory"}
"""What a replay, which the killed runs are held against, fills otherwise: it has no buffers for messages."""
SURVIVORS_TIME = 5.0
"""Seconds in which the ranks that are left may notice; torchrun, or a supervisor, ends them then."""


@dataclass
class Tally:
    """What happened."""

    runs: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    """Kills by what the run was doing."""
    survivors_ended: int = 0
    """Of the ranks whose neighbour was killed: how many had to be ended."""
    steps_again: int = 0
    """Steps done again, since they had not been saved."""
    torn_lines: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.hit.total()


def kill_once(attempt: Attempt, chance: random.Random, tally: Tally) -> None:
    """Kill a random rank of an attempt at a random time, unless the run completes before."""
    match chance.choice(["any", "training", "saving"]):
        case "any":
            moment = attempt.started + chance.uniform(0.0, 2.0)
        case "training":
            attempt.wait_until(lambda: attempt.trains)
            moment = time.monotonic() + chance.uniform(0.0, 0.5)
        case _:
            attempt.wait_until(lambda: attempt.trains)
            time.sleep(chance.uniform(0.0, 0.3))
            attempt.wait_until(lambda: attempt.saves)
            moment = time.monotonic() + chance.uniform(0.0, 0.01)
    attempt.wait_until(lambda: time.monotonic() >= moment)
    victim = chance.choice(attempt.processes)
    if not attempt.goes_on or victim.pid is None:
        return
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    if victim.exitcode != -signal.SIGKILL:
        return  # it had just ended by itself
    tally.hit["saving" if attempt.saves else "training" if attempt.trains else "starting"] += 1


def disturb(run: Run, undisturbed: Run, *, kills: int, chance: random.Random, tally: Tally) -> None:
    """Run to the end, with up to `kills` kills on the way, and look for what is missing."""
    tally.runs += 1
    allowed = tally.kills + kills
    saved: dict[int, int] = {}
    number = 0
    while run.status().state != State.COMPLETED:
        number += 1
        before, attempts = run.saved_step or 0, run.status().attempt
        if saved and before < max(saved.values()):
            tally.problems.append(f"{run.folder}: a checkpoint after {max(saved.values())} is {before} now")
        attempt = Attempt(run, size=RANKS, number=number)
        if tally.kills < allowed:
            kill_once(attempt, chance, tally)
            tally.survivors_ended += attempt.finish(
                seconds=LONGEST_ATTEMPT if attempt.goes_on else SURVIVORS_TIME
            )
        elif attempt.finish(seconds=LONGEST_ATTEMPT):
            raise SystemExit(f"{run.folder} has come to a standstill")
        elif any(process.exitcode != 0 for process in attempt.processes):
            raise SystemExit(f"{run.folder} failed without a kill; see soak.log in it")
        if run.status().attempt > attempts:
            saved[run.status().attempt] = before
    tally.problems += [f"{run.folder}: {problem}" for problem in compare(run, undisturbed, saved, tally)]


def compare(run: Run, undisturbed: Run, saved: dict[int, int], tally: Tally) -> list[str]:
    """What is lost, doubled, different or damaged in a run that was killed and is complete.

    Args:
        run: which.
        undisturbed: the same without a kill.
        saved: by attempt, the newest checkpoint when it began.
        tally: of all runs.
    """
    problems = []
    rows, torn = run.metrics_and_torn_lines()
    tally.torn_lines += torn
    kept, expected = without_clock(rows), without_clock(undisturbed.metrics())
    if kept != expected:
        kinds = Counter(row["kind"] for row in kept), Counter(row["kind"] for row in expected)
        problems.append(f"its rows differ: {kinds[0]} instead of {kinds[1]}")
    written = [json.loads(line) for line in run.metrics_file.read_text().splitlines() if line.endswith("}")]
    for row in written:
        if row["kind"] == "start" and row["step"] != saved[row["attempt"]]:
            problems.append(
                f"attempt {row['attempt']} began after {row['step']}, not {saved[row['attempt']]}"
            )
    done = without_clock([row for row in written if row["kind"] != "start"])
    tally.steps_again += sum(row["kind"] == "step" for row in done) - sum(
        row["kind"] == "step" for row in expected
    )
    problems += [f"a row that was done again differs: {row}" for row in done if row not in expected]
    if "is not used" in (run.folder / "soak.log").read_text():
        problems.append("a checkpoint was damaged")
    for step in checkpoint_files.saved_steps(run.checkpoints):
        folder = checkpoint_files.folder_of(run.checkpoints, step)
        wrong = checkpoint_files.damage(folder, checkpoint_files.read_manifest(folder).items())
        problems += [f"checkpoint {step}: {wrong}"] if wrong else []
    return problems


def without_clock(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in CLOCK | OF_PROCESSES}
        for row in rows
        if row["kind"] != "start"
    ]


def fresh(run: Run, name: str) -> Run:
    """The same run, not yet begun, in another folder."""
    copy = Run(run.folder.parent.parent / "disturbed" / name)
    copy.folder.mkdir(parents=True)
    shutil.copy(run.config_file, copy.config_file)
    return copy


def soak(folder: Path, cells: str, *, kills: int, steps: int, seed: int) -> Tally:
    """Kill runs of all `cells`, of `steps` steps each, in turn, `kills` times in all."""
    os.environ.update(ASYNCPP_CACHE=str(folder / "cache"), OMP_NUM_THREADS="1")
    (folder / "text").write_text(Path(__file__).read_text())
    (folder / "soak.yaml").write_text(cells + COMMON)
    subprocess.run(
        [
            *(sys.executable, "-m", "asyncpp_cli", "sweep", str(folder / "soak.yaml")),
            *(f"train.steps={steps}", f"data.path={folder / 'text'}", "--out", str(folder / "e")),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    forkserver.set_forkserver_preload(
        ["asyncpp_cli.commands.runs.train", "asyncpp_cli.runs.recorder", "stages.trainer", "torch._dynamo"]
    )
    chance, tally = random.Random(seed), Tally()
    runs = open_experiment(folder / "e").runs
    for index, run in enumerate(runs):
        alone = Attempt(run, size=1, number=0)
        alone.finish(seconds=LONGEST_ATTEMPT)
        if run.status().state != State.COMPLETED:
            raise SystemExit(f"{run.folder} failed without a kill; see soak.log in it")
        wanted = tally.kills + -(-(kills - tally.kills) // (len(runs) - index))
        while tally.kills < wanted:
            copy = fresh(run, f"{tally.runs}-{run.id}")
            disturb(copy, run, kills=wanted - tally.kills, chance=chance, tally=tally)
            print(f"{copy.folder.name}: {tally.kills} kills so far", file=sys.stderr, flush=True)
    return tally


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=240, help="of each run")
    parser.add_argument(
        "--every",
        action="store_true",
        help="every schedule with AdamW and Muon, with and without error feedback",
    )
    parser.add_argument("--seed", type=int, default=None, help="of the times; random if not given")
    parser.add_argument("--keep", type=Path, help="an empty folder to run in, left as it is")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else time.time_ns() % 2**32
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        cells = EVERY if options.every else FIVE
        tally = soak(folder.absolute(), cells, kills=options.kills, steps=options.steps, seed=seed)
    figures = {
        "kills": tally.kills,
        **{f"kills_while_{doing}": tally.hit[doing] for doing in ("starting", "training", "saving")},
        "runs": tally.runs,
        "steps_done_again": tally.steps_again,
        "torn_lines": tally.torn_lines,
        "survivors_ended": tally.survivors_ended,
        "problems": tally.problems,
    }
    conditions = {
        "seed": seed,
        "steps_a_run": options.steps,
        "saved_every": SAVED_EVERY,
        "seconds": round(time.monotonic() - began),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if options.json:
        print(json.dumps({**figures, "conditions": conditions}))
    else:
        for name, value in {**figures, **conditions}.items():
            print(f"{name:24} {value}")
    if tally.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
