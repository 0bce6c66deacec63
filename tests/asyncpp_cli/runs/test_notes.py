"""`asyncpp note`: notes and tags of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.files import contents
from support.report_experiment import ExperimentFolder, settings

import asyncpp as api
from asyncpp_cli.runs.notes import FILE, notes_of
from asyncpp_cli.runs.run_folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    experiment = ExperimentFolder(tmp_path / "e")
    experiment.add(settings("2bw", "muon", seed=1))
    return experiment.add(settings("1f1b", "muon"))


def test_notes_are_appended_and_shown_by_status_and_report(run: Run) -> None:
    folder = run.folder.parent.parent
    succeeded("note", run.folder, "spike at 300 <b>", "--tag", "spiky")
    first = (run.folder / FILE).read_bytes()
    api.open(folder).note("run-1", tags=["kept", "spiky"])
    assert (run.folder / FILE).read_bytes().startswith(first)
    shown = asyncpp("note", folder / "run-1").output
    assert "[spiky] spike at 300 <b>" in shown
    assert shown.count("\n") == 2
    records = json.loads(asyncpp("note", run.folder, "--json").output)
    assert [record["tags"] for record in records] == [["spiky"], ["kept", "spiky"]]
    by_id = {record["id"]: record for record in json.loads(asyncpp("status", folder, "--json").output)}
    assert (by_id["run-1"]["tags"], by_id["run-1"]["notes"]) == (["spiky", "kept"], ["spike at 300 <b>"])
    assert by_id["run-0"]["tags"] == []
    assert "spiky, kept" in asyncpp("status", folder).output
    report = json.loads(asyncpp("report", folder, "--format", "json").output)
    cell = next(cell for cell in report if cell["schedule"] == "1f1b")
    assert (cell["tags"], cell["notes"]) == (["spiky", "kept"], ["run-1: spike at 300 <b>"])


def test_a_torn_line_loses_no_other_note(run: Run) -> None:
    (run.folder / FILE).write_bytes(b'{"time": 1.0, "by": "me", "te')
    succeeded("note", run.folder, "after")
    assert [note.text for note in notes_of(run)] == ["after"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tag", "two words"], "accepted: up to 40 letters"),
        (["  "], "the note is empty"),
        (["x" * 4001], "up to 4,000"),
        (["text", "--json"], "--json shows notes"),
    ],
)
def test_a_note_that_is_not_accepted_writes_nothing(run: Run, arguments: list[str], message: str) -> None:
    folder = run.folder.parent.parent
    before = contents(folder)
    assert message in refusal("note", run.folder, *arguments)
    assert contents(folder) == before


def test_one_run_must_be_named(run: Run) -> None:
    folder = run.folder.parent.parent
    for path in (folder, folder / "run", folder / "nothing", folder.parent):
        refused = asyncpp("note", path, "text")
        assert refused.code == 2, path
    assert not list(folder.rglob(FILE))
