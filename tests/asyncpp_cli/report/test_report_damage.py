"""Runs that failed, are gone, or whose files are damaged: reported as such, the rest unharmed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from support.attempts import claimed
from support.command_line import asyncpp
from support.files import edit
from support.report_experiment import (
    ExperimentFolder,
    cells_of,
    metrics,
    report_of,
    settings,
)

from asyncpp_cli.report.analysis.timelines import timeline_pairs
from asyncpp_cli.report.formats.gantt_svg import to_svg
from asyncpp_cli.report.formats.latex import to_latex
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.formats.page_data import page_data
from asyncpp_cli.report.formats.records import step_table, to_csv, to_json
from asyncpp_cli.report.formats.text import to_markdown, to_text
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.status import State, Status


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


def test_a_run_whose_process_has_vanished_is_not_called_running(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    run = experiment.add(settings("2bw", "adamw"), status=Status(state=State.PENDING))
    code = (
        "import sys; from pathlib import Path; from asyncpp_cli.runs.attempts.claims import claim; "
        "from asyncpp_cli.runs.processes import this_process; "
        "from asyncpp_cli.runs.run_folder import open_run; "
        "attempt = claim(open_run(Path(sys.argv[1])), processes=1, replay=True, steps=4); "
        "attempt.record_start(0, this_process())"
    )
    subprocess.run([sys.executable, "-c", code, str(run.folder)], check=True, timeout=60)
    [cell] = cells_of(experiment.folder)
    assert cell["status"] == "failed"
    assert "rank 0" in cell["reason"]


def spoil_a_row(metrics_file: Path) -> None:
    text = metrics_file.read_text()
    metrics_file.write_text(text.replace('"steady_seconds": 2.0', '"steady_seconds": "long"'))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("metrics.jsonl", Path.unlink),
        ("metrics.jsonl", spoil_a_row),
        ("config.yaml", Path.unlink),
        ("config.yaml", lambda file: file.write_text("train: [1, 2")),
        ("status.json", lambda file: file.write_text('{"format": 1, "sta')),
        ("status.json", lambda file: edit(file, format=99)),
    ],
)
def test_a_damaged_run_is_reported_and_the_rest_unharmed(
    quickstart: ExperimentFolder, file: str, damage: Callable[[Path], object]
) -> None:
    whole = cells_of(quickstart.folder)
    damage(quickstart.folder / "runs" / quickstart.cells[-1].id / file)
    *others, damaged = cells_of(quickstart.folder)
    assert others == whole[:-1]
    assert (damaged["schedule"], damaged["status"], damaged["n"]) == ("2bw", "damaged", 1)
    assert file in damaged["reason"]
    assert file in re.sub(r"\s", "", to_text(report_of(quickstart.folder)))


@pytest.mark.slow
def test_a_torn_line_costs_that_line_alone(quickstart: ExperimentFolder) -> None:
    whole = cells_of(quickstart.folder)
    file = quickstart.folder / "runs" / quickstart.cells[0].id / "metrics.jsonl"
    # As a process that is killed while it writes.
    first, torn, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, torn[:20] + "\n", torn, *rest]))
    assert cells_of(quickstart.folder) == whole
    printed = asyncpp("report", quickstart.folder)
    assert "1 truncated line(s)" in " ".join(printed.output.split())


def test_a_diverged_run_is_null_in_json_and_named_in_the_table(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    experiment.add(settings("1f1b", "muon"))
    experiment.add(settings("2bw", "muon"), rows=metrics(val_losses=(4.0, math.nan), delay=1))
    [_, diverged] = cells_of(experiment.folder)
    assert (diverged["val_loss"], diverged["gap"], diverged["status"]) == (None, None, "completed")
    assert "nan" in to_text(report_of(experiment.folder))


def test_repeated_steps_count_once(tmp_path: Path) -> None:
    """A run that was killed and begun again: only the second attempt's rows count."""
    experiment = ExperimentFolder(tmp_path / "experiment")
    first = metrics(val_losses=(9.0, 9.0), steady=((1, 100.0), (1, 100.0)))[:6]
    experiment.add(settings("1f1b", "muon"), rows=[*first, *metrics(val_losses=(4.0, 3.0))])
    [cell] = cells_of(experiment.folder)
    assert (cell["val_loss"], cell["tokens_per_second"]) == (3.0, 1000.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings_of_hypothesis(max_examples=100, deadline=None)
@given(
    schedules=st.permutations(["1f1b", "2bw"]),
    place=st.integers(0, 10),
    field=st.integers(0, 100),
    value=JSON,
    remove=st.booleans(),
)
@pytest.mark.slow
def test_no_row_whatever_it_holds_stops_the_report(
    schedules: list[str], place: int, field: int, value: Any, remove: bool
) -> None:
    rows = metrics()
    for row in rows:
        if row["kind"] == "segment":
            row["action_seconds"] = {"F": [0.1, 0.1], "B": [0.2, 0.2], "U": [0.01, 0.01]}
            row["memory"] = {"total": [1, 2], "device_peak": []}
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
