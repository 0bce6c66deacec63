"""`asyncpp remove` asks and loses nothing else; ids and paths are those of the experiment, or are refused."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.attempts import claimed, submitted
from support.command_line import Terminal, asyncpp, refusal, succeeded
from support.files import contents, edit, write_program
from support.report_experiment import ExperimentFolder, settings

import asyncpp as api
from asyncpp_cli.experiment import removal
from asyncpp_cli.launch.common.arrays import ArrayManifest
from asyncpp_cli.runs.attempts.files import Claimed, Job, RankStart
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.submissions import read_submissions
from stages.config.records import DamagedError, read_record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two completed runs and one that has not begun."""
    experiment = ExperimentFolder(tmp_path / "e")
    experiment.add(settings("1f1b", "muon"))
    experiment.add(settings("2bw", "muon"))
    experiment.add(settings("paci", "muon"), status=Status(state=State.PENDING))
    return tmp_path / "e"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What is none of the experiment's, beside it."""
    (tmp_path / "victim" / "plain").mkdir(parents=True)
    (tmp_path / "victim" / "plain" / "thesis.tex").write_text("years of work")
    return tmp_path / "victim"


@pytest.mark.parametrize(("answer", "removes"), [("yes\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_it_names_files_and_steps_and_asks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, removes: bool
) -> None:
    before = contents(folder)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ended = asyncpp("remove", folder, "run-0")
    assert "run-0: completed, 4 of 4 steps, 3 files" in ended.errors
    assert "Remove this run for good? [y/N]" in ended.errors
    assert ended.code == (0 if removes else 1)
    if not removes:
        assert contents(folder) == before
        return
    others = {name: text for name, text in before.items() if not name.startswith("runs/run-0/")}
    after = contents(folder)
    assert after.keys() == others.keys()
    assert all(after[name] == others[name] for name in others if name != "experiment.json")
    assert [cell.id for cell in open_experiment(folder).cells] == ["run-1", "run-2"]
    succeeded("status", folder)


def test_without_a_terminal_it_wants_to_be_told(folder: Path) -> None:
    before = contents(folder)
    assert "--yes" in refusal("remove", folder, "run-0", "run-2", remarks=2)
    assert contents(folder) == before
    with pytest.raises(api.UserError, match="4 of 4 steps"):
        api.open(folder).remove("run-0")
    assert contents(folder) == before
    api.open(folder).remove("run-0", yes=True)
    succeeded("remove", folder, "run-2", "--yes")
    assert api.open(folder).ids == ["run-1"]
    assert [path.name for path in (folder / "runs").iterdir()] == ["run-1"]


def test_a_running_run_is_refused_together_with_all_others(folder: Path) -> None:
    run = open_experiment(folder).run("run-2")
    claimed(run, processes=1, replay=True, steps=4)
    before = contents(folder)
    assert "run-2 is running" in refusal("remove", folder, "run-1", "run-2", "--yes")
    assert contents(folder) == before


def test_a_run_that_starts_while_it_asks_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = open_experiment(folder)
    chosen = [experiment.run("run-1"), experiment.run("run-2")]
    removal.checked(experiment, chosen)
    claimed(chosen[1], processes=1, replay=True, steps=4)
    before = contents(folder)
    with pytest.raises(api.UserError, match="run-2 is running"):
        removal.remove_runs(experiment, chosen)
    assert contents(folder) == before


def test_a_run_that_slurm_does_not_list_but_that_shows_signs_of_life_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another witness than squeue: the accounting, then what its processes write."""
    experiment = open_experiment(folder)
    run = experiment.run("run-2")
    submission = submitted(experiment, a=(run.id,))
    job = Job(cluster="c", name="a", index=0, id="7_0", restart=0, nodes="n1", submission=submission)
    attempt = claimed(run, processes=1, replay=True, steps=4, job=job)
    attempt.record_start(0, replace(this_process(), host="elsewhere"))
    description = attempt.read(Claimed)
    assert description is not None
    by = replace(description.by, host="elsewhere")
    attempt.write(structs.replace(description, by=by))
    os.utime(attempt.file(Claimed), (time.time() - 100,) * 2)
    accounts = tmp_path / "accounts"
    for name, said in (("scontrol", "ClusterName = c"), ("squeue", ""), ("sacct", f"$(cat {accounts})")):
        write_program(tmp_path / name, f'echo "{said}" | grep -v "^$" || :')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(removal, "_ACCOUNTING_SECONDS", 0.0)
    slurm.cluster.cache_clear()
    start = attempt.file(RankStart, 0)
    for state, seconds, message in (
        ("RUNNING", 100, "run-2: sacct has its job 7_0 as RUNNING, though squeue does not list it"),
        ("COMPLETED", 30, "run-2: a process of it wrote 30 s ago, though it counts as failed"),
        ("COMPLETED", 100, ""),
    ):
        accounts.write_text(f"7_0|{state}|0:0|9|n1|a")
        os.utime(start, (time.time() - seconds,) * 2)
        if message:
            assert message in refusal("remove", folder, "run-2", "--yes")
            assert run.folder.is_dir()
        else:
            succeeded("remove", folder, "run-2", "--yes")
    slurm.cluster.cache_clear()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["run-7"], "no such run"),
        (["run-"], "3 runs begin"),
        ([], "no runs named"),
        (["run-0", "run-1", "run-2"], "has no other runs"),
        *(([path], "") for path in ("", "..", "../run-0", ".", "/", "run-0/../run-1")),
    ],
)
def test_names_that_are_not_some_of_the_runs_remove_nothing(
    folder: Path, victim: Path, tmp_path: Path, names: list[str], message: str
) -> None:
    before = contents(tmp_path)
    ended = asyncpp("remove", folder, *names, "--yes")
    assert (ended.code, message in ended.errors) == (2, True)
    assert contents(tmp_path) == before


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


@pytest.mark.parametrize("what", ["runs/run-0", "runs"])
def test_a_linked_run_is_refused_before_its_cell_is_gone(
    folder: Path, victim: Path, tmp_path: Path, what: str
) -> None:
    (folder / what).rename(victim / "moved")
    (folder / what).symlink_to(victim / "moved")
    before = contents(folder.parent)
    succeeded("status", folder)
    for names in (["run-0"], ["run-1", "run-0"]):
        ended = asyncpp("remove", folder, *names, "--yes")
        assert (ended.code, "is a link" in ended.errors) == (2, True), ended
        assert contents(folder.parent) == before
    assert [cell.id for cell in open_experiment(folder).cells] == ["run-0", "run-1", "run-2"]


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
