"""Tables on narrow terminals, and what `status` shows of many runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from support.attempts import claimed
from support.command_line import asyncpp, succeeded
from support.files import ROOT, edit
from support.launches import sweep
from support.report_experiment import ExperimentFolder, quickstart_folder, settings, tuned_experiment

from asyncpp_cli.base.console import shown_table
from asyncpp_cli.base.tables import Fit
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.status import Cause, State, Status

WORDS = st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=9), max_size=6).map(" ".join)
NUMBERS = st.floats(-1e6, 1e6).map(lambda value: f"{value:,.4f}")
WIDTHS = (60, 80, 120)
WIDE = 400
"""Columns of a terminal on which nothing gives way."""
REMARKS = {"Same", "in", "all", "rows", "Columns", "hidden", "at", "this", "width"}


@given(st.lists(st.tuples(NUMBERS, WORDS, NUMBERS, WORDS), min_size=1, max_size=5), st.integers(40, 120))
def test_no_line_is_wider_than_the_terminal_and_no_number_or_word_is_cut(
    rows: list[tuple[str, ...]], width: int
) -> None:
    columns = ["run", "loss of words", "about", "1.5 x sync", "reason"]
    table = [["id-of-a-run", *row] for row in rows]
    fit = Fit(hide=["1.5 x sync"], fold=["about", "reason"])
    lines = shown_table(columns, table, title="title", width=width, fit=fit).plain.splitlines()
    assert all(len(line) <= width for line in lines)
    whole = {word for row in [columns, *table] for text in row for word in text.split()} | REMARKS
    for line in lines[1:]:
        for word in line.replace(":", "").replace("─", "").split():
            assert word.rstrip(",") in whole, word


def test_columns_give_way_in_order_and_what_is_hidden_is_named() -> None:
    rows = [["1f1b-adamw-s0-189d2753", "micro", "off", ""], ["2bw-adamw-s0-9e981ded", "micro", "1", ""]]
    columns, fit = ["run", "model", "error_feedback", "step s"], Fit(share=["model"], hide=["error_feedback"])
    assert shown_table(columns, rows, title="t", width=39, fit=fit).plain.splitlines() == [
        "t",
        "run                     error_feedback",
        "─" * 38,
        "1f1b-adamw-s0-189d2753  off",
        "2bw-adamw-s0-9e981ded   1",
        "Same in all rows: model micro",
    ]
    assert shown_table(columns, rows, title="t", width=30, fit=fit).plain.splitlines() == [
        "t",
        "run",
        "─" * 22,
        "1f1b-adamw-s0-189d2753",
        "2bw-adamw-s0-9e981ded",
        "Same in all rows: model micro",
        "Columns hidden at this width:",
        "error_feedback",
    ]


def test_prose_is_folded_between_words_and_an_id_without_room_anywhere() -> None:
    rows = [["a", "three words and more of them", "12"], ["b", "two words", "3"]]
    folded = shown_table(["run", "about", "n"], rows, title="t", width=33, fit=Fit(fold=["about"]))
    assert folded.plain.splitlines()[1:] == [
        "run  about                      n",
        "─" * 33,
        "a    three words and more of   12",
        "     them",
        "b    two words                  3",
    ]
    shown = shown_table(["run", "n"], [["1f1b-adamw-ef0-micro-s0-189d2753", "1,234"]], title="", width=31)
    assert shown.plain.splitlines()[3:] == ["1f1b-adamw-ef0-micro-s0-  1,234", "189d2753"]


def test_a_column_without_a_title_and_texts_takes_no_room() -> None:
    """As in `asyncpp diff` of two single cells, which need no name."""
    shown = shown_table(["", "A", "B"], [["", "3.5", "3.25"]], title="t", width=60)
    assert shown.plain.splitlines()[1:] == ["    A     B", "─" * 11, "  3.5  3.25"]


def test_elsewhere_a_row_is_a_line_with_all_columns() -> None:
    rows = [["x" * 90, "y " * 90, "z"]]
    shown = shown_table(["a", "b\nc", "d e"], rows, title="t", width=None, fit=Fit(fold=["d e"]))
    title, headings, row = shown.plain.splitlines()
    assert (title, headings.split(), row[-1]) == ("t", ["a", "b", "c", "d", "e"], "z")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What every command with a table prints, by command and width of the terminal."""
    folder = tmp_path_factory.mktemp("tables")
    seeds = quickstart_folder(folder / "seeds", seeds=3)
    failed = Status(
        state=State.FAILED, attempt=1, step=2, steps=4, reason=f"rank 1: OSError: {'words ' * 20}"
    )
    seeds.add(settings("2bw", "soap", **{"optimizer.lr": 0.00125}), status=failed)
    quickstart_folder(folder / "others")
    tuned_experiment(folder / "tuned")
    geometry = ["--stages", "4", "--microbatches", "8"]
    pivot = ["--rows", "optimizer", "--cols", "schedule,error_feedback", "--value", "val_loss,gap"]
    commands = [
        ["report", "seeds"],
        ["report", "seeds", *pivot],
        ["status", "seeds"],
        ["status", "seeds", "--cells"],
        ["diff", "seeds", "others"],
        ["tune", "tuned", "--dry-run"],
        ["tune", "quickstart", "--over", "optimizer.lr=1e-4:1e-1:log", "--dry-run"],
        ["sweep", "quickstart", "matrix.seed=[0,1]", "--list"],
        ["plan", "quickstart", "--gpus", "2", "--schedule", "2bw", "--rows", "99"],
        ["plan", "360m", "--gpus", "4", "--schedule", "2bw", "--device", "a100", "--rows", "9"],
        ["templates", "list"],
        ["optimizers", "list"],
        ["optimizers", "show", "muon"],
        ["optimizers", "show", "error-feedback"],
        ["schedule", "list"],
        ["schedule", "compare", "1f1b", "zero-bubble", "2bw", *geometry],
        ["schedule", "show", "2bw", *geometry],
        ["theory", "stability"],
        ["doctor"],
    ]
    # Those that take seconds run at two widths, and the one that starts two processes with torch at one.
    slow = ("plan", "theory")
    widths = [[60, WIDE] if command[0] in slow else [*WIDTHS, WIDE] for command in commands]
    widths[-1] = [60]
    asked, results = list(zip(commands, widths, strict=True)), folder / "results.json"
    script = ROOT / "tests" / "support" / "every_command.py"
    words = [sys.executable, "-P", script, "--widths", json.dumps(asked), results]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, check=True)
    by_width = json.loads(results.read_text())
    return {
        " ".join(command): {int(width): Text.from_ansi(text).plain for width, text in texts.items()}
        for command, texts in zip(commands, by_width, strict=True)
    }


@pytest.mark.slow
def test_no_command_prints_a_line_wider_than_the_terminal(printed: dict[str, dict[int, str]]) -> None:
    for command, texts in printed.items():
        for width in texts:
            wider = [line for line in texts[width].splitlines() if len(line) > width]
            assert not wider, (command, width, wider)
        assert "hidden at this width" not in texts.get(WIDE, ""), command


@pytest.mark.slow
def test_no_command_cuts_a_number_or_a_word(printed: dict[str, dict[int, str]]) -> None:
    """Whatever stands alone on a narrow terminal stands so on a wide one, where nothing gives way."""
    for command, texts in printed.items():
        if command.startswith(("schedule show", "doctor")):
            continue  # A chart has other times on each line, by design; a disk other free space each time.
        whole = _numbers_and_words(texts[WIDE]) | REMARKS
        for width in texts:
            assert not (cut := _numbers_and_words(texts[width]) - whole), (command, width, cut)


def _numbers_and_words(text: str) -> set[str]:
    words = {word.strip(",.:;()") for word in text.split()}
    return {word for word in words if re.fullmatch(r"[-+]?\d[\d,.]*(±[\d.]+)?%?|[A-Za-z]+", word)}


@pytest.mark.slow
def test_an_experiment_that_names_no_gpu_is_planned_without_times(printed: dict[str, dict[int, str]]) -> None:
    shown = printed["plan quickstart --gpus 2 --schedule 2bw --rows 99"][60]
    assert "nano on 2 ranks" in shown
    assert not [word for word in ("h100", "tokens/s", "e-0") if word in shown]
    rows = [line for line in shown.split("\n\n")[0].splitlines() if line.startswith("2bw")]
    # Layouts that are as fast and differ in micro-batches alone are listed once.
    assert f"the best {len(rows)} pipelines" in " ".join(shown.split())


def swept(folder: Path) -> Experiment:
    """The quickstart with two seeds, of which three runs are completed and one has failed."""
    experiment = sweep(folder, "matrix.seed=[0,1]")
    done = Status(state=State.COMPLETED, attempt=1, step=40, steps=40, started=0.0, updated=0.0)
    failed = replace(done, state=State.FAILED, cause=Cause.ERROR, reason="rank 1: RuntimeError: a long story")
    rows = [
        {"kind": "start", "attempt": 1, "step": 0},
        {"kind": "end", "step": 40, "weights_sha256": "0" * 64},
    ]
    for number, run in enumerate(experiment.runs[:4]):
        written = rows if number < 3 else rows[:1]
        run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in written))
        run.write_status(replace(done if number < 3 else failed, train_loss=3.0 + number))
    return experiment


def test_the_failed_runs_alone_and_a_line_for_each_cell(tmp_path: Path) -> None:
    experiment = swept(tmp_path / "e")
    assert len(experiment.runs) == 12
    failed = asyncpp("status", tmp_path / "e", "--failed").output.splitlines()
    assert [line.split()[0] for line in failed[2:]] == [experiment.runs[3].id]
    diverged = replace(experiment.runs[3].status(), train_loss=math.nan)
    experiment.runs[3].write_status(diverged)
    (told,) = json.loads(asyncpp("status", tmp_path / "e", "--failed", "--json").output)
    # NaN is not JSON.
    assert (told["id"], told["train_loss"]) == (experiment.runs[3].id, None)
    experiment.runs[3].write_status(replace(diverged, train_loss=6.0))
    title, heading, *cells = asyncpp("status", tmp_path / "e", "--cells").output.splitlines()
    assert title == "quickstart: 3 completed, 1 failed, 8 pending"
    assert heading.split("  ")[0] == "schedule"
    assert [cell.split() for cell in cells[:3]] == [
        ["1f1b", "muon", "off", "2", "2", "100%", "3.500"],
        ["2bw", "muon", "off", "2", "1", "1", "100%", "5.500"],
        ["2bw", "muon", "1", "2", "2"],
    ]
    assert len(cells) == 6
    refused = asyncpp("status", tmp_path / "e", "--cells", "--failed")
    assert (refused.code, refused.errors.count("\n")) == (2, 1)


@pytest.mark.parametrize("ahead", [-7200.0, 0.0, 7200.0])
def test_a_running_run_was_heard_of_a_moment_ago_whatever_its_machines_clock(
    ahead: float, tmp_path: Path
) -> None:
    run = ExperimentFolder(tmp_path / "e").add(settings("2bw", "adamw"), status=Status(state=State.PENDING))
    claimed(run, processes=1, replay=True, steps=4).record_start(0, this_process())
    edit(run.status_file, state="running", updated=time.time() + ahead)
    said = re.search(r" (-?[\d:]+) ago", succeeded("status", tmp_path / "e").output)
    assert said is not None
    minutes, seconds = map(int, said[1].split(":"))  # no hours, no minus
    assert 60 * minutes + seconds < 600


@pytest.mark.slow
def test_on_a_terminal_of_80_columns_every_run_is_a_line(printed: dict[str, dict[int, str]]) -> None:
    for command in ("status seeds", "sweep quickstart matrix.seed=[0,1] --list"):
        lines = printed[command][80].splitlines()
        runs = [line for line in lines if line.startswith(("1f1b-", "2bw-", "run-"))]
        assert len(runs) == (19 if command == "status seeds" else 12)
        assert len(lines) <= len(runs) + 18  # a reason is folded
