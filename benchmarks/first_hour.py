"""The first hour on a GPU: what gives most first, and one page of results.

    make gpu                                                  # all, about 30 minutes
    python benchmarks/first_hour.py --minutes 10              # what begins within ten minutes
    python benchmarks/first_hour.py --list

Each step is a command of its own with a time limit: one that fails or hangs is reported, the others go on.
NCCL needs a GPU for each rank: with two GPUs the doctor and the tests use it between two ranks; with one the
ranks of the tests share it, over gloo, and the page says so.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from frame import write_dated

TAIL = 40
"""Lines kept of a step's output."""


class Step(NamedTuple):
    """One thing to find out."""

    question: str
    command: tuple[str, ...]
    """Arguments of `sys.executable`; `FOLDER` is one for files."""
    begins: int
    """Minutes after which it begins at the latest, if all before it take as long as they should."""
    limit: int
    """Minutes after which it is ended."""


FOLDER = "FOLDER"
_STAGE = ("benchmarks/big_stage.py", "--device", "cuda")
_LARGER = ("--model", "10b-moe", "--schedules", "2bw", "--microbatch-size", "2", "--microbatches", "8")
_ASYNCPP = ("-m", "asyncpp_cli")
FIRST_STEPS = (
    *("one-step-delay", "model=135m", "matrix.optimizer=[adamw,muon]", "matrix.seed=[0]", "overrides=[]"),
    *("optimizer.lr=1e-3", "parallel.stages=4", "schedule.microbatches=8", "train.microbatch_size=8"),
    *("train.precision=bfloat16", "train.steps=60", "train.eval_interval=30", "train.eval_microbatches=8"),
    "train.checkpoint_interval=30",
)
"""The first steps of what one step of delay costs at 135M."""
PROFILED = (
    *("quickstart", "matrix.optimizer=[adamw]", "matrix.error_feedback=[false]", "train.steps=20"),
    *("train.eval_interval=20", "train.profile_steps=4", "matrix.schedule=[1f1b,2bw,fsdp]"),
    *("matrix.parallel.stages=[1,2]", "exclude=[{schedule: 2bw, parallel.stages: 1}]"),
)
"""One rank and two of `1f1b` and `fsdp`, and two of `2bw`, with profiles of torch."""

STEPS = (
    Step("Does this machine have what a run needs?", (*_ASYNCPP, "doctor"), 0, 3),
    Step(
        "Tokens per second, MFU and peak memory of a stage of 7b beside the plan's?",
        (*_STAGE, "--model", "7b", "--schedules", "2bw", "--recompute", "selective"),
        1,
        4,
    ),
    Step(
        "The same of experts?",
        (*_STAGE, "--model", "10b-moe", "--schedules", "2bw", "--recompute", "selective"),
        2,
        4,
    ),
    Step(
        "Tokens per second of a whole 360m beside transformers'?",
        ("benchmarks/peer.py", "--device", "cuda"),
        3,
        5,
    ),
    Step(
        "Do kernels, replay and two ranks on one GPU give a CPU's numbers?",
        ("-m", "pytest", "-m", "gpu", "-rA", "tests/stages/test_gpu.py"),
        3,
        8,
    ),
    Step("Which cells has 135M?", (*_ASYNCPP, "sweep", *FIRST_STEPS, "--out", f"{FOLDER}/135m"), 4, 2),
    Step(
        "Do their first steps train, side by side?",
        (*_ASYNCPP, "launch", f"{FOLDER}/135m", "--replay", "--max-parallel", "6"),
        4,
        8,
    ),
    Step("Which losses and rates have they?", (*_ASYNCPP, "report", f"{FOLDER}/135m"), 8, 2),
    Step("Which cells are profiled?", (*_ASYNCPP, "sweep", *PROFILED, "--out", f"{FOLDER}/profiled"), 8, 2),
    Step(
        "Do one rank and two that launch starts train, in shards and not, profiled?",
        (*_ASYNCPP, "launch", f"{FOLDER}/profiled"),
        8,
        5,
    ),
    Step("What does a host wait for, and what do CUDA and NCCL take?", ("benchmarks/gpu_facts.py",), 10, 3),
    Step(
        "Which recomputation has a stage of 7b room for, and how fast is it?",
        (*_STAGE, "--model", "7b", "--schedules", "1f1b,2bw"),
        12,
        10,
    ),
    Step("The same of experts, in larger micro-batches?", (*_STAGE, *_LARGER), 18, 10),
    Step(
        "Seconds of each optimizer's step?",
        ("benchmarks/optimizer_steps.py", "--device", "cuda", "--models", "135m"),
        22,
        8,
    ),
)
"""Speeds, numbers and an experiment begin within ten minutes. Only the report needs polars."""


class Outcome(NamedTuple):
    """How a step ended."""

    step: Step
    ended: str
    """`ok`, `failed (CODE)` or `ended after N minutes`."""
    seconds: float
    output: str


def perform(steps: Sequence[Step], *, folder: Path) -> list[Outcome]:
    """Perform the steps one after another; what goes wrong in one ends no other.

    Args:
        steps: to perform.
        folder: for experiments.
    """
    outcomes = []
    for step in steps:
        print(f"{step.question}  {_shown(step)}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        # A session of its own, so that its children end with it.
        running = subprocess.Popen(
            [sys.executable, *(word.replace(FOLDER, str(folder)) for word in step.command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = running.communicate(timeout=60 * step.limit)
            ended = "ok" if running.returncode == 0 else f"failed ({running.returncode})"
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            output, _ = running.communicate()
            ended = f"ended after {step.limit} minutes"
        outcomes.append(Outcome(step, ended, time.perf_counter() - started, output))
    return outcomes


def page(outcomes: Sequence[Outcome], *, device: str) -> str:
    """The results, for a page of benchmarks/results."""
    lines = [
        "# The first hour on a GPU",
        "",
        f"Device: {device}",
        "",
        "| question | ended | s |",
        "|---|---|---|",
    ]
    lines += [f"| {each.step.question} | {each.ended} | {each.seconds:.0f} |" for each in outcomes]
    for each in outcomes:
        tail = each.output.splitlines()[-TAIL:]
        lines += ["", f"## {each.step.question}", "", f"`{_shown(each.step)}`", "", "```text", *tail, "```"]
    return "\n".join(lines) + "\n"


def device_words(name: str, *, count: int) -> str:
    """The GPUs, and whether NCCL was used between ranks."""
    between = "NCCL between two ranks" if count > 1 else "no NCCL between ranks: two share the GPU, over gloo"
    return f"{count} x {name} ({between})"


def write(folder: Path, outcomes: Sequence[Outcome], *, device: str) -> None:
    """Write the page with its conditions, as benchmarks/results wants them."""
    write_dated(
        folder,
        "first-hour",
        page(outcomes, device=device),
        hardware=device,
        seeds="0 where a step trains; each step once",
    )


def _shown(step: Step) -> str:
    return shlex.join(["python", *step.command])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60, help="leave out what begins later")
    parser.add_argument("--list", action="store_true", help="show the steps")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the page")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if step.begins < options.minutes]
    if options.list:
        for step in steps:
            print(f"{step.begins:>3} min  {step.question}\n         {_shown(step)}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no GPU here; `asyncpp rehearse DIR` needs none", file=sys.stderr
        )
        return 2
    folder = Path(tempfile.mkdtemp(prefix="asyncpp-first-hour-"))
    outcomes = perform(steps, folder=folder)
    print(f"runs and their profiles: {folder}", file=sys.stderr)
    device = device_words(torch.cuda.get_device_name(), count=torch.cuda.device_count())
    write(options.out, outcomes, device=device)
    return 0 if all(each.ended == "ok" for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
