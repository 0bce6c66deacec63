"""What is said of runs while they go: by a launch of all of them, and by a training process of itself."""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyncpp_cli.base.progress import progress_bar
from asyncpp_cli.launch.progress import Display, shown_progress
from asyncpp_cli.runs.attempts.recorder import StepLines
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


def test_how_long_runs_that_are_left_take() -> None:
    whole = Display()
    completed = Status(state=State.COMPLETED, attempt=1, step=100, steps=100)
    half = Status(state=State.RUNNING, attempt=1, step=50, steps=100)
    waiting = Status(state=State.PENDING)
    runs = [Run(Path(name)) for name in "abc"]
    begun = list(zip(runs, [completed, waiting, waiting], strict=True))
    assert whole.remaining(begun, now=10.0) is None
    later = list(zip(runs, [completed, half, waiting], strict=True))
    assert whole.remaining(later, now=40.0) == pytest.approx(90.0)
    # Where none has begun nobody knows how much there is to do.
    assert Display().remaining([(Run(Path("a")), waiting)], now=1.0) is None


def test_the_remaining_time_begins_as_expected_and_follows_the_pace() -> None:
    total = Display(expected={"short": 60.0, "long": 540.0})
    short, long = Run(Path("short")), Run(Path("long"))
    pending = Status(state=State.PENDING)
    running = Status(state=State.RUNNING, attempt=1, step=0, steps=100)
    assert total.remaining([(short, running), (long, pending)], now=0.0) == pytest.approx(600.0)
    # As fast as expected: half of the short run in half a minute.
    half = [(short, replace(running, step=50)), (long, pending)]
    assert total.remaining(half, now=30.0) == pytest.approx(570.0)
    # What is slower than expected counts more and more.
    assert total.remaining(half, now=60.0) == pytest.approx(570.0 * 80 / 50)
    ended = replace(running, state=State.COMPLETED, step=100)
    slow = [(short, ended), (long, replace(running, step=50))]
    assert total.remaining(slow, now=660.0) == pytest.approx(270.0 * 680 / 350)


def test_a_terminal_has_a_bar_of_all_runs_and_a_line_for_each_that_ends() -> None:
    out = io.StringIO()
    shown = Console(file=out, force_terminal=True, width=80, color_system=None)
    with progress_bar(shown) as bar:
        display = Display(bar=bar, done_before=11)
        run, other = Run(Path("a")), Run(Path("b"))
        half = Status(state=State.RUNNING, attempt=1, step=50, steps=200)
        display.update([(run, half), (other, half)])
        ended = replace(half, state=State.COMPLETED, step=200, seconds=2.0)
        display.update([(run, ended), (other, replace(half, step=100, train_loss=3.25))])
        bar.refresh()
    assert "completed a: 200 steps in 0:02" in out.getvalue()
    last = next(line for line in reversed(out.getvalue().splitlines()) if "done" in line)
    assert "b: step 100 of 200, loss 3.250" in out.getvalue()
    assert "12 of 13 done" in last
    assert "━━━━━" in last
    assert last.rstrip().endswith("96%")


def test_a_file_gets_a_line_on_the_runs_that_train_every_half_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the remaining time of all runs; a remark is made once."""
    runs = [Run(Path(name)) for name in "abcdef"]
    expected = {run.id: 60.0 for run in runs}
    display = Display(expected=expected, remark=lambda seen: "half" * (seen[0][1].step == 50))
    began = time.monotonic()
    for step in range(100):
        running = Status(state=State.RUNNING, attempt=1, step=step, steps=100, train_loss=4.0 - step / 100)
        statuses = [(run, running if run.id in "ab" else Status(state=State.PENDING)) for run in runs]
        display.update(statuses, now=began + step)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines].count("training") == 3
    assert lines.count("half") == 1
    [line] = [line for line in lines if "step 60 of 100" in line]
    assert line.startswith(
        "training     a: step 60 of 100, loss 3.400; b: step 60 of 100, loss 3.400 (0 of 6 "
    )
    assert "done, about " in line
    three = [(run, Status(state=State.RUNNING, attempt=1, step=1, steps=9)) for run in runs[:3]]
    display.update(three, now=began + 500)
    display.update(three, now=began + 540)
    assert "a: step 1 of 9; b: step 1 of 9; 1 more (0 of 3" in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_a_file_gets_a_line_for_each_event_and_none_if_quiet(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = Run(Path("a")), Run(Path("b"))
    pending = Status(state=State.PENDING)
    running = Status(state=State.RUNNING, attempt=1, step=1, steps=200)
    with shown_progress(Display(), quiet=quiet) as display:
        display([(run, pending), (other, pending)])
        for step in range(1, 200):
            display([(run, replace(running, step=step)), (other, pending)])
        ended = replace(running, state=State.COMPLETED, step=200, seconds=2.0)
        display([(run, ended), (other, running)])
    lines = capsys.readouterr().err.splitlines()
    if quiet:
        assert lines == []
    else:
        assert [line.split()[:2] for line in lines] == [
            ["started", "a"],
            ["completed", "a:"],
            ["started", "b"],
        ]
        assert "(1 of 2 done, about " in lines[1]


def test_the_log_of_a_closed_pipe_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        lines = StepLines(steps=4)
        lines.row({"kind": "step", "step": 1, "tokens": 8, "train_loss": 1.0})
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
