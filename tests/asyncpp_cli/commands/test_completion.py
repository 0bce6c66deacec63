"""Completion by the shell, through Typer's protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import Ended, asyncpp
from support.report_experiment import ExperimentFolder, settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an experiment of two runs."""
    experiment = ExperimentFolder(tmp_path / "mine")
    experiment.add(settings("1f1b", "muon"), run_id="sync-s0")
    experiment.add(settings("2bw", "muon"), run_id="late-s0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_bash(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash offers for the last word of a line."""
    monkeypatch.setenv("COMP_WORDS", line.replace(" ", "\n"))
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    return offered("bash", monkeypatch).output.split()


def offered(shell: str, monkeypatch: pytest.MonkeyPatch) -> Ended:
    monkeypatch.setenv("_ASYNCPP_COMPLETE", f"complete_{shell}")
    ended = asyncpp()
    assert (ended.code, ended.errors) == (0, "")
    return ended


CASES = {
    "asyncpp sta": ["status"],
    "asyncpp schedule sh": ["show"],
    "asyncpp schedule show zb": ["zb-v"],
    "asyncpp optimizers show mu": ["muon"],
    "asyncpp logs mine/la": ["mine/late-s0"],
    "asyncpp diff mine/": ["mine/sync-s0", "mine/late-s0"],
    "asyncpp diff nothing/": [],
    "asyncpp sweep quick": ["quickstart"],
    "asyncpp plan qwen3": ["qwen3-0.6b"],
    "asyncpp launch mine --max": ["--max-parallel"],
}


@pytest.mark.parametrize("line", CASES)
def test_bash_is_offered(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert in_bash(line, monkeypatch) == CASES[line]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "asyncpp diff mine/")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    output = offered(shell, monkeypatch).output
    assert "mine/sync-s0" in output
    assert "mine/late-s0" in output


def test_a_damaged_experiment_completes_to_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine" / "experiment.json").write_text("{")
    assert in_bash("asyncpp diff mine/s", monkeypatch) == []
