"""What is said of runs while they go: by a launch of all of them, and by a training process of itself."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.command_line import asyncpp
from support.launches import TINY

from asyncpp_cli.launch.progress import _BarDisplay, _progress_bars, _Total
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.log_lines import StepLines
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


def test_how_many_of_all_runs_are_done_and_how_long_the_others_take() -> None:
    whole = _Total(done_before=6)
    completed = Status(state=State.COMPLETED, attempt=1, step=100, steps=100)
    half = Status(state=State.RUNNING, attempt=1, step=50, steps=100)
    waiting = Status()
    begun = [completed, waiting, waiting]
    assert whole.remaining(begun, now=10.0) is None
    assert whole.remaining([completed, half, waiting], now=40.0) == pytest.approx(90.0)
    assert whole.counts([completed, half, waiting]) == (7, 9)
    assert whole.line([(Run(Path("a")), completed)]) == "7 of 7 done"
    # Where none has begun nobody knows how much there is to do.
    assert _Total(done_before=0).remaining([waiting], now=1.0) is None


@pytest.mark.slow
def test_a_healthy_run_prints_how_far_it_is_under_torchrun_too(tmp_path: Path) -> None:
    one_run = ["matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]"]
    settings = ["train.steps=4", "train.eval_interval=2"]
    assert asyncpp("sweep", "quickstart", *TINY, *one_run, *settings, "--out", tmp_path / "e").code == 0
    (run,) = open_experiment(tmp_path / "e").runs
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "asyncpp_cli", "train", str(run.folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env=os.environ | {"COLUMNS": "80"}
    )
    assert done.returncode == 0, done.stderr
    beginning, *between, end = done.stdout.splitlines()
    # One process says it, not both.
    assert beginning.startswith("beginning of 4: ")
    assert beginning.endswith(" parameters, on cpu")
    assert end == "completed: 4 steps"
    assert [line.partition(":")[0] for line in between if "validation" in line][-1] == "step 4"
    assert between[0].startswith("step 1 of 4: training loss ")


def test_bars_have_their_numbers_on_80_columns() -> None:
    out = io.StringIO()
    shown = Console(file=out, force_terminal=True, width=80, color_system=None)
    with _progress_bars(shown) as progress:
        bars = _BarDisplay(progress, done_before=11)
        running = Status(
            state=State.RUNNING, attempt=1, step=1141, steps=3000, train_loss=2.5521, updated=1.0
        )
        run = Run(Path("2bw-adamw-ef0-micro-s0-88c27e40"))
        done = (Run(Path("a")), Status(state=State.COMPLETED, attempt=1, step=1, steps=1))
        bars.update([done, (run, running)])
        bars.update([done, (run, replace(running, step=1142, updated=1.1))])
        out.truncate(0)
        progress.refresh()
    first, second = [line for line in out.getvalue().splitlines() if "/" in line][:2]
    assert "12 of 13 runs done" in first
    assert "12/13" in first
    assert "2bw-adamw-ef0-m…ro-s0-88c27e40" in second
    assert "1142/3000 loss 2.552, 3:06 left" in second
    assert "━━━━━" in second


def test_the_log_of_a_closed_pipe_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        lines = StepLines(steps=4)
        lines.row({"kind": "step", "step": 1, "tokens": 8, "train_loss": 1.0})
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
