"""Files of one run in another's folder: every command names the run, and none believes them."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path

import pytest
from support.command_line import asyncpp
from support.files import contents
from support.report_experiment import ExperimentFolder, cells_of, metrics, settings

from asyncpp_cli.experiment.matrix import run_id
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import assign, config_hash
from asyncpp_cli.runs.status import State, Status
from stages.config.run_config import RunConfig


@pytest.fixture
def made(tmp_path: Path) -> ExperimentFolder:
    return ExperimentFolder(tmp_path / "e")


def add(made: ExperimentFolder, schedule: str, *, loss: float, state: State = State.COMPLETED) -> Run:
    """A run with the id that `sweep` gives it."""
    config = RunConfig()
    given = settings(schedule, "muon")
    assign(config, given)
    axes = {"schedule": schedule, "optimizer": "muon", "error_feedback": 0.0, "model": "nano", "seed": 0}
    return made.add(
        given,
        rows=[] if state == State.PENDING else metrics(val_losses=(4.0, loss)),
        status=None if state == State.COMPLETED else Status(state=state),
        axes=axes,
        run_id=run_id(axes, config_hash(config)),
    )


def test_another_runs_configuration_is_named_and_left_out(made: ExperimentFolder, tmp_path: Path) -> None:
    sync, delayed = add(made, "1f1b", loss=3.0), add(made, "2bw", loss=3.5)
    assert [cell["status"] for cell in cells_of(made.folder)] == ["completed", "completed"]
    shutil.copyfile(sync.config_file, delayed.config_file)
    named = f"{delayed.config_file} is another run's: its settings make the hash {sync.id[-8:]}"
    believed, left_out = cells_of(made.folder)
    assert (believed["n"], believed["val_loss"], left_out["status"]) == (1, 3.0, "damaged")
    assert (left_out["schedule"], left_out["val_loss"]) == ("2bw", None)
    assert named in left_out["reason"]
    before = contents(tmp_path)
    for command in (
        ["status", made.folder],
        ["report", made.folder],
        ["report", made.folder, "--format", "markdown"],
        ["report", made.folder, "--format", "json"],
        ["diff", delayed.folder, sync.folder],
        ["train", delayed.folder, "--replay"],
        ["export", delayed.folder, "--out", tmp_path / "out"],
        ["extend", made.folder, delayed.id, "--steps", "9", "--out", tmp_path / "out"],
        ["launch", made.folder, "--dry-run"],
    ):
        ended = asyncpp(*command)
        shown = "".join(html.unescape(ended.output + ended.errors).replace("\\", "").split())
        assert named.replace(" ", "") in shown, (command, ended)
        assert ended.code == (2 if command[0] in ("train", "export", "extend", "launch") else 0), command
        assert contents(tmp_path) == before


def test_a_launch_trains_no_run_with_anothers_configuration(made: ExperimentFolder) -> None:
    sync, delayed = (add(made, name, loss=3.0, state=State.PENDING) for name in ("1f1b", "2bw"))
    first, second = sync.config_file.read_bytes(), delayed.config_file.read_bytes()
    sync.config_file.write_bytes(second)
    delayed.config_file.write_bytes(first)
    ended = asyncpp("launch", made.folder, "--replay")
    assert ended.code == 1
    for run in (sync, delayed):
        assert f"left out: {run.config_file} is another run's" in ended.errors
        assert not run.attempts.exists()


def test_the_site_and_the_place_of_data_may_change(made: ExperimentFolder) -> None:
    run = add(made, "2bw", loss=3.0)
    text = run.config_file.read_text()
    run.config_file.write_text(text.replace("threads: 1", "threads: 2"))
    assert run.config_file.read_text() != text
    assert [cell["status"] for cell in cells_of(made.folder)] == ["completed"]
    [status] = json.loads(asyncpp("status", made.folder, "--json").output)
    assert status["state"] == "completed"
