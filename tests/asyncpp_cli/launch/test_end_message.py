"""`on_end` of a site profile: the user's command when a launch has ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.attempts import submitted
from support.command_line import asyncpp
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.launch.submission.end_message import claim_end
from asyncpp_cli.runs.experiment_folder import open_experiment

REPORT = """
import json, os, sys
open(sys.argv[1], "w").write(json.dumps([sys.argv[2:], dict(os.environ)]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    experiment = ExperimentFolder(tmp_path / "a b; touch x")
    experiment.add(settings("1f1b", "muon"))
    return experiment.folder


def launched(folder: Path, on_end: object) -> tuple[int, str]:
    site = folder.parent / "here.yaml"
    site.write_text(f"scheduler: local\non_end: {json.dumps(on_end)}\n")
    ended = asyncpp("launch", folder, "--site", site)
    return ended.code, ended.errors


def test_it_runs_without_a_shell_and_gets_a_sentence(folder: Path) -> None:
    file = folder.parent / "told"
    code, _ = launched(folder, [sys.executable, "-c", REPORT, str(file), "$HOME; >x"])
    assert code == 0
    words, facts = json.loads(file.read_text())
    assert words == ["$HOME; >x", f"trial: 1 of 1 runs completed in {folder}"]
    assert {name: facts[name] for name in ("ASYNCPP_FOLDER", "ASYNCPP_COMPLETED", "ASYNCPP_RUNS")} == {
        "ASYNCPP_FOLDER": str(folder),
        "ASYNCPP_COMPLETED": "1",
        "ASYNCPP_RUNS": "1",
    }
    assert not (folder.parent / "x").exists()


def test_a_command_that_fails_is_a_remark(folder: Path) -> None:
    code, errors = launched(folder, [sys.executable, "-c", "import sys; sys.exit(3)"])
    assert (code, "ended with exit code 3" in errors) == (0, True)
    code, errors = launched(folder, ["/no/such/command"])
    assert (code, "No such file" in errors) == (0, True)


@pytest.mark.parametrize("value", ["mail me", [""], [[1]], {"a": "b"}])
def test_a_command_that_is_no_list_of_words_is_refused(folder: Path, value: object) -> None:
    code, errors = launched(folder, value)
    assert code == 2
    assert "on_end" in errors


def test_an_end_is_claimed_once_and_by_the_last_launch(folder: Path) -> None:
    experiment = open_experiment(folder)
    assert claim_end(experiment)
    first, second = submitted(experiment), submitted(experiment)
    submitted(experiment, state="withdrawn")
    assert not claim_end(experiment, submission=first)
    assert claim_end(experiment, submission=second)
    # A job that SLURM starts again, and a command that waited.
    assert not claim_end(experiment, submission=second)
    assert not claim_end(experiment)
