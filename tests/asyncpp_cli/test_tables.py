"""Tables on narrow terminals, and what `status` shows of many runs."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import asyncpp
from support.launches import TINY

from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.tables import Narrow, compact, shortened

WORDS = st.text(alphabet="abc_ .", max_size=40)


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=5), st.integers(60, 100))
def test_a_row_is_a_line_no_longer_than_the_terminal(rows: list[tuple[str, str, str]], width: int) -> None:
    columns = ["run", "a_long_heading of words", "steps", "reason"]
    table = [[f"id-{'x' * 90}", *row] for row in rows]
    narrow = Narrow(optional=["a_long_heading of words", "steps"], beneath="reason")
    lines = compact(columns, table, width=width, title="title", narrow=narrow).splitlines()
    assert all(len(line) <= width for line in lines)
    assert sum(line.startswith("id-") for line in lines) == len(rows)


def test_shared_values_are_shown_once_and_the_middle_of_an_id_is_cut() -> None:
    rows = [["1f1b-adamw-s0-189d2753", "micro", "off", ""], ["2bw-adamw-s0-9e981ded", "micro", "1", ""]]
    narrow = Narrow(shared=["model", "error_feedback"])
    shown = compact(["run", "model", "error_feedback", "step s"], rows, width=40, title="t", narrow=narrow)
    assert shown.splitlines() == [
        "t",
        "in all: model micro",
        "                        error_",
        "run                     feedback",
        "1f1b-adamw-s0-189d2753  off",
        "2bw-adamw-s0-9e981ded   1",
    ]
    noted = compact(["run", "why"], [["a", "short"], ["b", "longer than that"]], width=12, title="t",
                    narrow=Narrow(beneath="why"))  # fmt: skip
    assert noted.splitlines()[2:] == ["a    short", "b", "    longer", "    than", "    that"]
    assert shortened("1f1b-adamw-s0-189d2753", 13) == "1f1b-a…9d2753"


def sweep(folder: Path) -> Experiment:
    made = asyncpp("sweep", "quickstart", *TINY, "matrix.seed=[0,1]", "--out", folder)
    assert made.code == 0, made.errors
    experiment = open_experiment(folder)
    for number, run in enumerate(experiment.runs[:4]):
        run.write_status(
            Status(
                state=State.COMPLETED if number < 3 else State.FAILED,
                cause=Cause.ERROR if number == 3 else Cause.NONE,
                reason="rank 1: RuntimeError: too many gradients were not finite, one after the other"
                if number == 3
                else "",
                attempt=1,
                step=40,
                steps=40,
                started=0.0,
                updated=0.0,
                train_loss=3.0 + number,
                tokens_per_second=123456.0,
            )
        )
    return experiment


def test_the_failed_runs_alone_and_a_line_for_each_cell(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e")
    assert len(experiment.runs) == 12
    failed = asyncpp("status", tmp_path / "e", "--failed").output.splitlines()
    assert [line.split()[0] for line in failed[2:]] == [experiment.runs[3].id]
    (told,) = json.loads(asyncpp("status", tmp_path / "e", "--failed", "--json").output)
    assert told["id"] == experiment.runs[3].id
    title, heading, *cells = asyncpp("status", tmp_path / "e", "--cells").output.splitlines()
    assert title == "quickstart: 3 completed, 1 failed, 8 pending"
    assert heading.split("  ")[0] == "schedule"
    assert [cell.split() for cell in cells[:3]] == [
        ["1f1b", "adamw", "off", "2", "2", "100%", "3.500"],
        ["1f1b", "muon", "off", "2", "1", "1", "100%", "5.500"],
        ["2bw", "adamw", "off", "2", "2"],
    ]
    assert len(cells) == 6
    refused = asyncpp("status", tmp_path / "e", "--cells", "--failed")
    assert (refused.code, refused.errors.count("\n")) == (2, 1)


@pytest.mark.slow
def test_on_a_terminal_of_80_columns_every_run_is_a_line(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e")
    for command in (["status", str(tmp_path / "e")], ["sweep", "quickstart", "matrix.seed=[0,1]", "--list"]):
        lines = on_a_terminal(*command, columns=80)
        assert max(map(len, lines)) <= 80
        runs = [line for line in lines if line.startswith(("1f1b-", "2bw-"))]
        assert len(runs) == len(experiment.runs)
        assert len(lines) <= len(runs) + 6
        if command[0] == "status":
            assert [line.split()[0] for line in runs] == [run.id for run in experiment.runs]
            assert any(line.startswith("    rank 1: RuntimeError: too many gradients") for line in lines)


def on_a_terminal(*command: str, columns: int) -> list[str]:
    """The lines that a command prints on a terminal."""
    controller, terminal = pty.openpty()
    size = {"COLUMNS": str(columns), "LINES": "50", "TERM": "dumb", "TTY_COMPATIBLE": "1"}
    words = [sys.executable, "-P", "-m", "asyncpp_cli", *command]
    with subprocess.Popen(words, stdout=terminal, env=os.environ | size) as process:
        os.close(terminal)
        printed = b""
        try:
            while part := os.read(controller, 1 << 16):
                printed += part
        except OSError:
            pass  # as a terminal ends on Linux
        assert process.wait(timeout=60) == 0
    os.close(controller)
    return [line.rstrip("\r") for line in printed.decode().splitlines()]
