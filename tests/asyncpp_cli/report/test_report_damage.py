"""Runs that failed, are gone, or whose files are damaged: named in the report, the rest unharmed."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
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
from support.launches import sweep, train_all
from support.report_experiment import JSON, ExperimentFolder, cells_of, metrics, report_of, settings

from asyncpp_cli.report.formats.latex import to_latex
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.formats.page import page_data
from asyncpp_cli.report.formats.records import step_table, to_csv, to_json
from asyncpp_cli.report.formats.text import to_markdown, to_text
from asyncpp_cli.report.formats.timelines import timeline_pairs, to_svg
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with two completed runs: 1f1b and 2bw."""
    folder = tmp_path_factory.mktemp("trained")
    changes = ["matrix={schedule: [1f1b, 2bw], optimizer: adamw}", "exclude=[]", "data.context=8"]
    sweep(folder / "e", *changes, "train.steps=6", "train.eval_interval=3", "model.layers=2")
    train_all(folder / "e")
    return folder / "e"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "e"))


Row = dict[str, Any]


def rows_of(run: Run) -> list[Row]:
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def write(run: Run, rows: list[Row]) -> None:
    """Write rows without their checksum."""
    for row in rows:
        row.pop("checksum", None)
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


Damage = Callable[[list[Row]], list[Row]]


def without(**values: Any) -> Damage:
    return lambda rows: [row for row in rows if not values.items() <= row.items()]


def changed(kind: str, **values: Any) -> Damage:
    return lambda rows: [row | values if row["kind"] == kind else row for row in rows]


DAMAGES: list[tuple[Damage, str]] = [
    (without(kind="eval", step=6), "its last evaluation is of step 3, and the run has 6"),
    (changed("eval", val_loss=-3.0), "is -3.0; losses are >= 0"),
    (changed("step", train_loss=-0.5), "is -0.5; losses are >= 0"),
    (without(kind="end"), "not the end row"),
    (changed("end", step=5), "the end row of metrics.jsonl is of step 5"),
    (without(kind="step", step=3), "its step rows have 4 where 3 is expected"),
    (without(kind="step", step=6), "its step rows end after 80 of 96 tokens"),
    (without(kind="step", step=1), "step rows"),
    (without(kind="segment", first_step=3), "its segments cover 3 steps after step 0, and the run has 6"),
    (changed("segment", delay_max=[7, 7]), "is [7, 7] by stage, and its schedule's is"),
    (changed("start", run="other"), "is another run's: 'other'"),
    (without(kind="start"), "no row of this attempt"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damage_is_named_and_the_run_is_left_out(folder: Path, damage: Damage, message: str) -> None:
    whole = cells_of(folder)
    run = open_experiment(folder).runs[1]
    # Even where the checksum was removed with the damage.
    write(run, damage(rows_of(run)))
    other, damaged = cells_of(folder)
    assert (other["val_loss"], other["status"]) == (whole[0]["val_loss"], "completed")
    assert (damaged["status"], damaged["val_loss"], damaged["gap"]) == ("damaged", None, None)
    assert message in damaged["reason"]
    assert str(run.metrics_file) in damaged["reason"]
    for form in ([], ["--format", "markdown"]):
        ended = asyncpp("report", folder, *form)
        assert (ended.code, "damaged" in ended.output) == (0, True)


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


@pytest.mark.slow
def test_status_and_report_name_what_was_changed(folder: Path) -> None:
    first, run = open_experiment(folder).runs
    text = run.metrics_file.read_text()
    digit = list(re.finditer(r'"val_loss": \d\.\d\d(\d)', text))[-1]
    changed_digit = text[: digit.start(1)] + str((int(digit[1]) + 1) % 10) + text[digit.end(1) :]
    for content in (changed_digit, first.metrics_file.read_text()):
        run.metrics_file.write_text(content)
        [_, status] = json.loads(asyncpp("status", folder, "--json").output)
        assert (status["state"], str(run.metrics_file) in status["reason"]) == ("damaged", True)
        [whole, damaged] = cells_of(folder)
        assert (whole["status"], damaged["status"], damaged["val_loss"]) == ("completed", "damaged", None)
        assert run.id in "".join(asyncpp("report", folder).output.split())


@pytest.mark.slow
def test_flipped_bytes_are_seen_or_change_no_number(folder: Path) -> None:
    run = open_experiment(folder).runs[1]
    whole = cells_of(folder)
    chance = random.Random(0)
    attempt = run.attempts / "1"
    files = [run.metrics_file, run.config_file, run.status_file, attempt / "attempt.json"]
    files += [attempt / "outcome.json", folder / "experiment.json"]
    for file in files:
        content = file.read_bytes()
        # The end of the file holds what says that it is whole.
        places = [chance.randrange(len(content)) for _ in range(12)]
        places += [len(content) - chance.randrange(1, min(120, len(content))) for _ in range(4)]
        for place in places:
            byte = content[place] ^ (1 << chance.randrange(7))
            where = f"{file.name}, byte {place} of {len(content)}: {content[place]} became {byte}"
            file.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            if file.name == "experiment.json" and (ended := asyncpp("report", folder)).code == 2:
                assert str(file) in ended.errors, where
                continue
            other, flipped = cells_of(folder)
            if [other, flipped] == whole:
                continue
            assert other["val_loss"] == whole[0]["val_loss"], where
            if file.parent == attempt:
                # It holds what the run has cost; the other numbers stay.
                assert str(file) in "".join(asyncpp("report", folder).output.split()), where
                assert flipped["val_loss"] == whole[1]["val_loss"], where
            else:
                assert flipped["status"] in ("damaged", "missing"), where
                assert (run.id in flipped["reason"], flipped["val_loss"]) == (True, None), where
        file.write_bytes(content)
    assert cells_of(folder) == whole


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


def test_a_diverged_run_is_null_in_json_and_named_in_the_table(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    experiment.add(settings("1f1b", "muon"))
    experiment.add(settings("2bw", "muon"), rows=metrics(val_losses=(4.0, math.nan), delay=1))
    [_, diverged] = cells_of(experiment.folder)
    assert (diverged["val_loss"], diverged["gap"], diverged["status"]) == (None, None, "completed")
    assert "nan" in to_text(report_of(experiment.folder))


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
