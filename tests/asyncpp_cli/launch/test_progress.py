"""What is said of runs while they go: by a launch of all of them, and by a training process of itself."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyncpp_cli.launch.progress import _BarDisplay, _progress_bars, _Total
from asyncpp_cli.runs.log_lines import StepLines
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


def test_how_many_of_all_runs_are_done_and_how_long_the_others_take() -> None:
    whole = _Total(done_before=6)
    completed = Status(state=State.COMPLETED, attempt=1, step=100, steps=100)
    half = Status(state=State.RUNNING, attempt=1, step=50, steps=100)
    waiting = Status(state=State.PENDING)
    begun = [completed, waiting, waiting]
    assert whole.remaining(begun, now=10.0) is None
    assert whole.remaining([completed, half, waiting], now=40.0) == pytest.approx(90.0)
    assert whole.counts([completed, half, waiting]) == (7, 9)
    assert whole.line([(Run(Path("a")), completed)]) == "7 of 7 done"
    # Where none has begun nobody knows how much there is to do.
    assert _Total(done_before=0).remaining([waiting], now=1.0) is None


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
