"""What is said of runs while they go: by a launch of all of them, and by a training process of itself."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyncpp_cli.base.progress import progress_bar
from asyncpp_cli.launch.progress import _Display, _Total, shown_progress
from asyncpp_cli.runs.attempts.recorder import StepLines
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


def test_how_many_of_all_runs_are_done_and_how_long_the_others_take() -> None:
    whole = _Total(done_before=6)
    completed = Status(state=State.COMPLETED, attempt=1, step=100, steps=100)
    half = Status(state=State.RUNNING, attempt=1, step=50, steps=100)
    waiting = Status(state=State.PENDING)
    runs = [Run(Path(name)) for name in "abc"]
    begun = list(zip(runs, [completed, waiting, waiting], strict=True))
    assert whole.remaining(begun, now=10.0) is None
    later = list(zip(runs, [completed, half, waiting], strict=True))
    assert whole.remaining(later, now=40.0) == pytest.approx(90.0)
    assert whole.counts([completed, half, waiting]) == (7, 9)
    assert whole.line([(Run(Path("a")), completed)]) == "7 of 7 done"
    # Where none has begun nobody knows how much there is to do.
    assert _Total(done_before=0).remaining([(Run(Path("a")), waiting)], now=1.0) is None


def test_the_remaining_time_begins_as_expected_and_follows_the_pace() -> None:
    total = _Total(done_before=0, expected={"short": 60.0, "long": 540.0})
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
        display = _Display(bar, done_before=11)
        run, other = Run(Path("a")), Run(Path("b"))
        half = Status(state=State.RUNNING, attempt=1, step=50, steps=200)
        display.update([(run, half), (other, half)])
        ended = replace(half, state=State.COMPLETED, step=200, seconds=2.0)
        display.update([(run, ended), (other, replace(half, step=100))])
        bar.refresh()
    assert "completed a: 200 steps in 0:02" in out.getvalue()
    last = next(line for line in reversed(out.getvalue().splitlines()) if "done" in line)
    assert "12 of 13 done" in last
    assert "━━━━━" in last
    assert last.rstrip().endswith("96%")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_file_gets_a_line_for_each_event_and_none_if_quiet(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = Run(Path("a")), Run(Path("b"))
    pending = Status(state=State.PENDING)
    running = Status(state=State.RUNNING, attempt=1, step=1, steps=200)
    with shown_progress(quiet=quiet) as display:
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
