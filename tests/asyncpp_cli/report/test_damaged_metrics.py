"""No damage to the files of a run changes the report in silence: it is the same, or it names the run."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp, succeeded
from support.files import edit
from support.launches import train_all
from support.report_experiment import ExperimentFolder, cells_of, metrics, settings

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status

TINY = """\
name: tiny
matrix: {schedule: [1f1b, 2bw]}
optimizer: adamw
model: micro
model.layers: 2
model.width: 16
model.heads: 2
model.kv_heads: 2
model.mlp_width: 32
parallel.stages: 2
schedule.microbatches: 2
train: {steps: 6, microbatch_size: 1, eval_interval: 3, eval_microbatches: 1}
data: {context: 8}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with two completed runs: 1f1b and 2bw."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(TINY)
    succeeded("sweep", folder / "tiny.yaml", "--out", folder / "e")
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


def without(chosen: Callable[[Row], bool]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row for row in rows if not chosen(row)]


def changed(kind: str, **values: Any) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row | values if row["kind"] == kind else row for row in rows]


DAMAGES = {
    "last evaluation missing": (
        without(lambda row: row["kind"] == "eval" and row["step"] == 6),
        "its last evaluation is of step 3, and the run has 6",
    ),
    "negative validation loss": (changed("eval", val_loss=-3.0), "is -3.0; losses are >= 0"),
    "negative training loss": (changed("step", train_loss=-0.5), "is -0.5; losses are >= 0"),
    "end row missing": (without(lambda row: row["kind"] == "end"), "not the end row"),
    "end row of another step": (changed("end", step=5), "the end row of metrics.jsonl is of step 5"),
    "steps missing": (
        without(lambda row: row["kind"] == "step" and row["step"] in (3, 4)),
        "its step rows have 5 where 3 is expected",
    ),
    "last step missing": (
        without(lambda row: row["kind"] == "step" and row["step"] == 6),
        "its step rows end after 80 of 96 tokens",
    ),
    "first step missing": (without(lambda row: row["kind"] == "step" and row["step"] == 1), "step rows"),
    "segment missing": (
        without(lambda row: row["kind"] == "segment" and row["first_step"] == 3),
        "its segments cover 3 steps after step 0, and the run has 6",
    ),
    "another delay": (changed("segment", delay_max=[7, 7]), "is [7, 7] by stage, and its schedule's is"),
    "another run": (changed("start", run="other"), "is another run's: 'other'"),
    "start row missing": (without(lambda row: row["kind"] == "start"), "no row of this attempt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_named_and_the_run_is_left_out(folder: Path, name: str) -> None:
    damage, message = DAMAGES[name]
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
@pytest.mark.parametrize("name", ["another run's file", "a digit"])
def test_status_and_report_name_what_was_changed(folder: Path, name: str) -> None:
    first, run = open_experiment(folder).runs
    match name:
        case "another run's file":
            shutil.copyfile(first.metrics_file, run.metrics_file)
        case "a digit":
            text = run.metrics_file.read_text()
            found = list(re.finditer(r'"val_loss": \d\.\d\d(\d)', text))[-1]
            digit = str((int(found[1]) + 1) % 10)
            run.metrics_file.write_text(text[: found.start(1)] + digit + text[found.end(1) :])
    [_, status] = json.loads(asyncpp("status", folder, "--json").output)
    assert status["state"] == "damaged"
    assert str(run.metrics_file) in status["reason"]
    [whole, damaged] = cells_of(folder)
    assert (whole["status"], damaged["status"], damaged["val_loss"]) == ("completed", "damaged", None)
    text = "".join(asyncpp("report", folder).output.split())
    assert run.id in text


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
            file.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            if file.name == "experiment.json":
                ended = asyncpp("report", folder)
                assert (ended.code, str(file) in ended.errors) == (2, True) or cells_of(folder) == whole
                continue
            if file.parent == attempt:
                # It holds what the run has cost; the other numbers stay.
                other, flipped = cells_of(folder)
                where = f"{file.name}, byte {place} of {len(content)}: {content[place]} became {byte}"
                if [other, flipped] != whole:
                    assert str(file) in "".join(asyncpp("report", folder).output.split()), where
                    assert flipped["val_loss"] == whole[1]["val_loss"], where
                continue
            other, flipped = cells_of(folder)
            where = f"{file.name}, byte {place} of {len(content)}: {content[place]} became {byte}"
            assert other["val_loss"] == whole[0]["val_loss"], where
            if [other, flipped] != whole:
                assert flipped["status"] in ("damaged", "missing"), where
                assert run.id in flipped["reason"], where
                assert flipped["val_loss"] is None, where
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
    text = file.read_text()
    file.write_text(text + text.splitlines()[1][:30])  # torn
    assert [cell["status"] for cell in cells_of(made.folder)] == ["paused", "interrupted", "failed"]
    edit(made.folder / "runs" / failed.id / "status.json", reason="out of memory")
    assert cells_of(made.folder)[2]["reason"] == f"{failed.id}: failed: out of memory"
