"""Names, reasons and logs cannot steer a terminal, nor become formulas in a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import succeeded
from support.files import edit
from support.report_experiment import ExperimentFolder, report_of, settings

from asyncpp_cli.base.console import Stream, printable, printable_lines, steering
from asyncpp_cli.report.formats.latex import to_latex
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.formats.page import page_data
from asyncpp_cli.report.formats.records import csv_text, to_csv, to_json
from asyncpp_cli.report.formats.text import to_markdown, to_text
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.status import State, Status

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\udcff\r\b"
"""Sets a terminal's title, wipes it, colours it, turns the writing round; and is not UTF-8."""


@given(text=st.text())
@pytest.mark.slow
def test_no_control_characters_are_left(text: str) -> None:
    assert all(character.isprintable() or character.isspace() for character in printable(text))
    assert "\n" not in printable(text)
    lines = printable_lines(text)
    assert not set(lines) & (set(map(chr, [*range(32), 127, *range(128, 160)])) - {"\n", "\t"})
    assert printable_lines(lines) == lines


def test_a_terminal_is_steered_only_where_that_is_meant() -> None:
    leader, follower = pty.openpty()
    file = Stream(io.BufferedWriter(io.FileIO(follower, "w")), encoding="utf-8", errors="backslashreplace")
    print(f"name {EVIL}", file=file, flush=True)
    print("\x1b[1mbold\x1b[0m", file=steering(file), flush=True)
    shown = b""
    # A terminal may give what was written in parts.
    while b"bold" not in shown or shown.count(b"\x1b") < 2:
        shown += os.read(leader, 4096)
    assert shown.count(b"\x1b") == 2
    assert b"\x07" not in shown
    file.close()
    os.close(leader)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """An experiment whose name, reason and log are not to be trusted."""
    made = ExperimentFolder(tmp_path / "experiment")
    made.add(settings("1f1b", "muon"))
    run = made.add(
        settings("2bw", "muon"),
        status=Status(state=State.FAILED, attempt=1, step=2, steps=4, reason=f"=cmd {EVIL}"),
    )
    run.logs.mkdir()
    Attempt(run, 1).log_file(0).write_text(f"loss {EVIL}\n", errors="surrogateescape")
    description = made.folder / "experiment.json"
    edit(description, name=f"evil {EVIL}")
    return made.folder


def commands(folder: Path) -> list[list[str]]:
    run = max((folder / "runs").iterdir()).name
    return [["status", str(folder)], ["report", str(folder)], ["logs", str(folder), run, "--attempt", "1"]]


@pytest.mark.slow
def test_a_terminal_sees_none_of_it(experiment: Path) -> None:
    """On a real terminal, where colours are: none of what the texts hold gets there."""
    leader, follower = pty.openpty()
    code = (
        "import sys; from asyncpp_cli import main\n"
        "for arguments in eval(sys.argv[1]):\n"
        "    sys.argv = ['asyncpp', *arguments]\n"
        "    try: main.main()\n"
        "    except SystemExit as ended: assert not ended.code, ended.code\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, repr(commands(experiment))],
        stdout=follower,
        stderr=follower,
        stdin=follower,
        env=dict(os.environ, TERM="xterm", COLUMNS="80"),
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:
            break
        shown += part
    os.close(leader)
    assert child.wait(60) == 0, shown.decode()
    text = shown.decode()
    assert "]0;title" in text
    for steering_text in ("\x1b]0;title", "\x07", "\x1b[2J", "\x9b", "\u202e", "\b"):
        assert steering_text not in text


def test_nor_does_what_is_piped(experiment: Path) -> None:
    for arguments in commands(experiment):
        ended = succeeded(*arguments)
        assert "title" in ended.output
        assert not set(ended.output + ended.errors) & set("\x1b\x07\x9b\u202e\b\udcff")


@pytest.mark.slow
def test_names_that_are_not_utf_8_in_every_format(experiment: Path, tmp_path: Path) -> None:
    there = experiment.rename(tmp_path / os.fsdecode(b"experiment-\xff"))
    report = replace(report_of(there), name=f"name {EVIL}")
    texts = [to_text(report), to_markdown(report), to_latex(report, ReportOptions()), to_csv(report)]
    for text in (*texts, page_data(report.cells, {})):
        text.encode()
    json.loads(to_json(report))
    for form in ("table", "markdown", "latex", "csv", "json", "html"):
        out = tmp_path / os.fsdecode(b"out-\xff." + form.encode())
        succeeded("report", there, "--format", form, "--out", out)
        assert out.stat().st_size


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("=1+2", "'=1+2"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'=1"),
        ("\r=1", "'=1"),
        ("-0.5", "-0.5"),
        ("+1e-3", "+1e-3"),
        (-0.5, "-0.5"),
        (-3, "-3"),
        (None, ""),
        ("plain", "plain"),
        ("a-b", "a-b"),
        ("--x", "'--x"),
    ],
)
def test_cells_of_csv_are_no_formulas(value: Any, written: str) -> None:
    [[found], *_] = csv.reader(io.StringIO(csv_text([[value]]))) or [[""]]
    assert found == written if value is not None else not found
