"""`asyncpp remove`: names what would be lost, asks, and loses nothing else."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.attempts import claimed, submitted
from support.command_line import Terminal, asyncpp, refusal, succeeded
from support.files import contents
from support.report_experiment import ExperimentFolder, settings

import asyncpp as api
from asyncpp_cli.experiment import removal
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.files import Claimed, Job, RankStart
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.slurm import client as slurm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two completed runs and one that has not begun."""
    experiment = ExperimentFolder(tmp_path / "e")
    experiment.add(settings("1f1b", "muon"))
    experiment.add(settings("2bw", "muon"))
    experiment.add(settings("paci", "muon"), status=Status(state=State.PENDING))
    return tmp_path / "e"


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
    assert claim(run, processes=1, replay=True, steps=4) is not None
    before = contents(folder)
    assert "run-2 is running" in refusal("remove", folder, "run-1", "run-2", "--yes")
    assert contents(folder) == before


def test_a_run_that_starts_while_it_asks_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = open_experiment(folder)
    chosen = [experiment.run("run-1"), experiment.run("run-2")]
    removal.losses(experiment, chosen)
    assert claim(chosen[1], processes=1, replay=True, steps=4) is not None
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
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{said}" | grep -v "^$" || :\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(removal, "_SECONDS_OF_ACCOUNTS", 0.0)
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
    ("names", "message"), [(["run-7"], "no such run"), (["run-"], "3 runs begin"), ([], "no runs named")]
)
def test_a_name_that_is_not_one_run_removes_nothing(folder: Path, names: list[str], message: str) -> None:
    before = contents(folder)
    assert message in refusal("remove", folder, *names, "--yes")
    assert contents(folder) == before


def test_all_runs_of_an_experiment_are_not_removed(folder: Path) -> None:
    before = contents(folder)
    assert "has no other runs" in refusal("remove", folder, "run-0", "run-1", "run-2", "--yes")
    assert contents(folder) == before
