"""Runs that failed, diverged or are gone, in a report. Damaged files: `runs/test_damaged_runs.py`."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from support.attempts import claimed
from support.command_line import asyncpp
from support.files import edit
from support.json_values import JSON
from support.report_experiment import ExperimentFolder, cells_of, metrics, report_of, settings

from asyncpp_cli.report.formats.latex import to_latex
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.formats.page import page_data
from asyncpp_cli.report.formats.records import step_table, to_csv, to_json
from asyncpp_cli.report.formats.text import to_markdown, to_text
from asyncpp_cli.report.formats.timelines import timeline_pairs, to_svg
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.status import State, Status


@pytest.mark.slow
def test_other_data_than_the_configurations_is_named(tmp_path: Path) -> None:
    made = ExperimentFolder(tmp_path / "e")
    sha256 = {"data.path": "somewhere", "data.sha256": "a" * 64}
    for corpus in ("a" * 64, "b" * 64):
        rows = metrics()
        rows[0]["corpus_sha256"] = corpus
        made.add(settings("1f1b", "muon", seed=len(made.cells), **sha256), rows=rows)
    [cell] = cells_of(made.folder)
    assert (cell["status"], cell["n"]) == ("damaged", 1)
    assert "its rows are of other data than its configuration" in cell["reason"]


def test_runs_that_are_not_completed_are_shown_as_far_as_they_are(tmp_path: Path) -> None:
    made = ExperimentFolder(tmp_path / "e")
    for state in (State.PAUSED, State.INTERRUPTED, State.FAILED):
        rows = metrics()[:5]
        axes = {"optimizer.lr": 1e-3 * (len(made.cells) + 1)}
        status = Status(state=state, attempt=1, step=2, steps=4)
        made.add(settings("1f1b", "muon", **axes), rows=rows, status=status, axes=axes)
    assert [cell["status"] for cell in cells_of(made.folder)] == ["paused", "interrupted", "failed"]
    [*_, failed] = made.cells
    file = made.folder / "runs" / failed.id / "metrics.jsonl"
    # As a process that is killed while it writes.
    first, torn, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, torn[:20] + "\n", torn, *rest]))
    assert "1 truncated line(s)" in " ".join(asyncpp("report", made.folder).output.split())
    assert [cell["status"] for cell in cells_of(made.folder)] == ["paused", "interrupted", "failed"]
    edit(made.folder / "runs" / failed.id / "status.json", reason="out of memory")
    assert cells_of(made.folder)[2]["reason"] == f"{failed.id}: failed: out of memory"


def test_every_cell_is_shown_whatever_became_of_it(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    experiment.add(settings("1f1b", "muon"))
    killed = Status(state=State.FAILED, attempt=1, step=2, steps=4, reason="rank 1 was killed by SIGKILL")
    experiment.add(settings("2bw", "muon"), status=killed)
    going_on = experiment.add(settings("2bw", "adamw"), status=Status(state=State.PENDING))
    attempt = claimed(going_on, processes=1, replay=True, steps=4)
    attempt.record_start(0, this_process())
    experiment.add(settings("gpipe", "muon"), status=Status(state=State.PENDING))
    gone = experiment.add(settings("gpipe", "adamw"))
    for file in gone.folder.iterdir():
        file.unlink()
    gone.folder.rmdir()
    cells = cells_of(experiment.folder)
    assert [cell["status"] for cell in cells] == ["completed", "failed", "running", "pending", "missing"]
    assert "SIGKILL" in cells[1]["reason"]
    assert (cells[4]["schedule"], cells[4]["optimizer"], cells[4]["val_loss"]) == ("gpipe", "adamw", None)
    assert "rank 1 was killed by SIGKILL" in to_text(report_of(experiment.folder))
    assert "rank 1 was killed by SIGKILL" in to_markdown(report_of(experiment.folder))


def test_a_diverged_run_is_null_in_json_and_named_in_the_table(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    experiment.add(settings("1f1b", "muon"))
    experiment.add(settings("2bw", "muon"), rows=metrics(val_losses=(4.0, math.nan), delay=1))
    [_, diverged] = cells_of(experiment.folder)
    assert (diverged["val_loss"], diverged["gap"], diverged["status"]) == (None, None, "completed")
    experiment.add(settings("2bw", "muon", seed=1), rows=metrics(delay=1))
    text = to_text(report_of(experiment.folder))
    assert "nan" in text
    # Not those of the other seeds: the mean is not a number.
    assert "Losses and gaps there are those of the runs that are complete." in text


@pytest.mark.parametrize("step", [-1, 2**63, 10**30])
def test_a_step_that_no_column_holds_damages_its_run_alone(tmp_path: Path, step: int) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    rows = metrics()
    rows[1]["step"] = step
    experiment.add(settings("1f1b", "muon"), rows=rows)
    experiment.add(settings("2bw", "muon"))
    assert [cell["status"] for cell in cells_of(experiment.folder)] == ["damaged", "completed"]


@settings_of_hypothesis(max_examples=100, deadline=None)
@given(st.permutations(["1f1b", "2bw"]), st.integers(0, 10), st.integers(0, 100), JSON, st.booleans())
@pytest.mark.slow
def test_no_row_whatever_it_holds_stops_the_report(
    schedules: list[str], place: int, field: int, value: Any, remove: bool
) -> None:
    rows = metrics()
    for row in rows:
        if row["kind"] == "segment":
            row["action_seconds"] = {"F": [0.1, 0.1], "B": [0.2, 0.2], "U": [0.01, 0.01]}
            row["memory"] = {"total": [1, 2], "device_peak": []}
            row["load_per_core"] = 0.5
    row = rows[place % len(rows)]
    name = list(row)[field % len(row)]
    if remove:
        del row[name]
    else:
        row[name] = value
    with tempfile.TemporaryDirectory() as folder:
        experiment = ExperimentFolder(Path(folder) / "experiment")
        experiment.add(settings(schedules[0], "muon"), rows=rows)
        experiment.add(settings(schedules[1], "muon"))
        report = report_of(experiment.folder, keep_steps=True, target=3.5)
        cells = json.loads(to_json(report))
        assert cells[1]["val_loss"] == 3.0
        assert cells[0]["status"] in ("completed", "damaged")
        written = (to_text(report), to_markdown(report), to_latex(report, ReportOptions()), to_csv(report))
        for text in (*written, page_data(report.cells, {})):
            assert "2bw" in text
        step_table(report.cells)
        for pair in timeline_pairs(report.cells):
            assert to_svg(pair).endswith("</svg>")
