"""Ids and paths in an experiment's files name folders of the experiment, or the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.files import contents, edit
from support.report_experiment import ExperimentFolder, begun, settings

from asyncpp_cli.launch.common.arrays import ArrayManifest
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.slurm.submissions import read_submissions
from stages.config.records import DamagedError, read_record

HOSTILE = [
    "..",
    ".",
    "",
    "../../victim/plain",
    "../run-1",
    "a/b",
    "a\\b",
    "/tmp",
    "~",
    "run-0\0",
    "run-0\n",
    "-rf",
    ".hidden",
    "a" * 300,
    "a b",
    "\x1b[31m",
    "*",
    7,
    None,
    ["run-0"],
]

COMMANDS: list[list[Any]] = [
    ["status", "EXPERIMENT"],
    ["status", "EXPERIMENT", "--json"],
    ["report", "EXPERIMENT"],
    ["diff", "EXPERIMENT", "EXPERIMENT"],
    ["launch", "EXPERIMENT", "--replay"],
    ["cancel", "EXPERIMENT"],
    ["launch", "EXPERIMENT", "ID", "--failed"],
    ["remove", "EXPERIMENT", "ID", "--yes"],
    ["logs", "EXPERIMENT", "ID"],
    ["extend", "EXPERIMENT", "ID", "--steps", "9", "--out", "OUT"],
    ["extend", "EXPERIMENT", "--steps", "9", "--out", "OUT"],
    ["mirror", "EXPERIMENT", "--to", "tensorboard"],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs, beside what is none of theirs."""
    experiment = ExperimentFolder(tmp_path / "e")
    begun(experiment.add(settings("1f1b", "muon"), status=Status(state=State.PENDING)))
    experiment.add(settings("2bw", "muon"))
    (tmp_path / "victim" / "plain").mkdir(parents=True)
    (tmp_path / "victim" / "plain" / "thesis.tex").write_text("years of work")
    return tmp_path / "e"


@pytest.mark.slow
@pytest.mark.parametrize("hostile", ["../run-1", "run-0\n"], ids=ascii)
def test_a_hostile_id_is_refused_by_every_command(folder: Path, tmp_path: Path, hostile: Any) -> None:
    cells = json.loads((folder / "experiment.json").read_text())["cells"]
    edit(folder / "experiment.json", cells=[cells[0] | {"id": hostile}, cells[1]])
    before = contents(tmp_path)
    for command in COMMANDS:
        named = str(hostile).replace("\0", "")
        given = {"EXPERIMENT": folder, "ID": named, "OUT": tmp_path / "out"}
        ended = asyncpp(*(given.get(word, word) for word in command))
        assert ended.code == 2, (command, ended)
        assert "Traceback" not in ended.errors
        assert "\x1b" not in ended.errors
        assert contents(tmp_path) == before
        if not named.startswith(("-", "\x1b")) and "\\" not in named:
            assert "experiment.json: cells[0].id is" in ended.errors or "No such" in ended.errors, ended


def test_an_id_of_two_cells_is_refused(folder: Path) -> None:
    cells = json.loads((folder / "experiment.json").read_text())["cells"]
    edit(folder / "experiment.json", cells=[cells[0], cells[0]])
    assert "cells[1].id is run-0, which is an earlier cell's" in refusal("remove", folder, "run-0", "--yes")


@pytest.mark.parametrize("name", ["", "..", "../run-0", ".", "/", "run-0/../run-1"])
def test_a_name_that_is_a_path_removes_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    before = contents(tmp_path)
    assert asyncpp("remove", folder, name, "--yes").code == 2
    assert contents(tmp_path) == before


@pytest.mark.parametrize("what", ["run", "runs"])
def test_a_linked_run_is_refused_before_its_cell_is_gone(folder: Path, tmp_path: Path, what: str) -> None:
    moved = folder / "runs" / "run-0" if what == "run" else folder / "runs"
    moved.rename(tmp_path / "victim" / "moved")
    moved.symlink_to(tmp_path / "victim" / "moved")
    before = contents(tmp_path)
    succeeded("status", folder)
    for names in (["run-0"], ["run-1", "run-0"]):
        ended = asyncpp("remove", folder, *names, "--yes")
        if names == ["run-1", "run-0"]:
            assert "has no other runs" in ended.errors or "is a link" in ended.errors
        else:
            assert f"{folder}/runs/run-0 is a link" in ended.errors
        assert ended.code == 2
        assert contents(tmp_path) == before
    assert [cell.id for cell in open_experiment(folder).cells] == ["run-0", "run-1"]


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
def test_hostile_names_in_other_records_are_refused(folder: Path, hostile: Any) -> None:
    experiment = open_experiment(folder)
    array = {"name": "a", "file": "array-0.json", "runs": ["run-0"], "shape": "s"}
    texts = dict.fromkeys(("site", "cluster", "user", "host", "state", "interpreter"), "x")
    whole = {"format": 1, "time": 1.0, "software": {}, "code": "abc", "arrays": [array]} | texts
    submission = experiment.submissions / "1" / "submission.json"
    submission.parent.mkdir(parents=True)
    submission.write_text(json.dumps(whole))
    assert [each.folder for each in read_submissions(experiment).all] == [submission.parent]
    damages = [
        {"arrays": [array | {"runs": [hostile]}]},
        {"arrays": [array | {"file": hostile}]},
        {"code": hostile},
    ]
    for damage in damages:
        submission.write_text(json.dumps(whole | damage))
        assert read_submissions(experiment).all == []

    shape = {"nodes": 1, "tasks": 1, "tasks_per_node": 1, "cpus_per_task": 1, "gpus_per_node": 0}
    row = {"id": "run-0", "config_sha256": "0", "steps": 4}
    manifest = {"name": "a", "submission": "1", "cluster": "c", "replay": False, "retries": 0}
    manifest |= {"signal_lead": 1, "network_interface": None, "srun_flags": [], "site_settings": {}}
    manifest |= {"code": "abc", "software": {}, "shape": shape, "rows": [row]}
    file = folder / "array-0.json"
    file.write_text(json.dumps(manifest))
    assert read_record(file, ArrayManifest).rows[0].id == "run-0"
    for change in ({"rows": [row | {"id": hostile}]}, {"submission": hostile}):
        file.write_text(json.dumps(manifest | change))
        with pytest.raises(DamagedError, match=r"array-0\.json: (rows\[0\]\.id|submission) is"):
            read_record(file, ArrayManifest)

    parent = {"format": 1, "experiment": "/e", "run": hostile, "step": 1, "steps": 2, "changed": {}}
    (folder / "runs" / "run-1" / "parent.json").write_text(json.dumps(parent))
    assert "parent.json: run is" in " ".join(asyncpp("report", folder).output.split())


def test_an_endless_number_of_attempts_is_refused(folder: Path) -> None:
    edit(folder / "runs" / "run-0" / "status.json", attempt=2**52)
    ended = asyncpp("status", folder)
    assert (ended.code, "attempt is 4503599627370496; accepted" in " ".join(ended.output.split())) == (
        0,
        True,
    )
