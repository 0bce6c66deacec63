"""Completion by bash and zsh, through the protocol that their scripts speak."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import Ended, asyncpp
from support.files import contents
from support.report_experiment import ExperimentFolder, settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an experiment of two runs, and another folder."""
    experiment = ExperimentFolder(tmp_path / "mine")
    experiment.add(settings("1f1b", "muon"), run_id="sync-s0")
    experiment.add(settings("2bw", "muon"), run_id="late-s0")
    (tmp_path / "more").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_bash(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash offers for the last word of a line."""
    monkeypatch.setenv("COMP_WORDS", line.replace(" ", "\n"))
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    monkeypatch.setenv("_ASYNCPP_COMPLETE", "complete_bash")
    return offered().output.split()


def offered() -> Ended:
    ended = asyncpp()
    assert (ended.code, ended.errors) == (0, "")
    return ended


CASES = {
    "asyncpp sta": ["status"],
    "asyncpp schedule sh": ["show"],
    "asyncpp status m": ["mine"],
    "asyncpp status mo": ["more/"],
    "asyncpp logs mine ": ["sync-s0", "late-s0"],
    "asyncpp launch mine sync-s0 ": ["late-s0"],
    "asyncpp cancel mine l": ["late-s0"],
    "asyncpp cancel nothing l": [],
    "asyncpp diff mi": ["mine/"],
    "asyncpp diff mine/": ["mine/sync-s0", "mine/late-s0"],
    "asyncpp sweep quick": ["quickstart"],
    "asyncpp sweep quickstart train.eval_i": ["train.eval_interval="],
    "asyncpp sweep quickstart matrix.optimizer.nam": ["matrix.optimizer.name="],
    "asyncpp plan qwen3": ["qwen3-0.6b"],
    "asyncpp launch mine --site loc": ["local"],
    "asyncpp launch mine --max": ["--max-parallel"],
}


@pytest.mark.parametrize("line", CASES)
def test_bash_is_offered(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    before = contents(folder)
    assert in_bash(line, monkeypatch) == CASES[line]
    assert contents(folder) == before


def test_zsh_is_offered_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ASYNCPP_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "asyncpp logs mine ")
    assert '"sync-s0"\n"late-s0"' in offered().output


def test_a_damaged_experiment_completes_to_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine" / "experiment.json").write_text("{")
    assert in_bash("asyncpp logs mine s", monkeypatch) == []


@pytest.mark.slow
def test_it_imports_nothing_slow(folder: Path) -> None:
    code = (
        "import sys, atexit; from asyncpp_cli.main import main; heavy = {'torch', 'polars', 'submitit'}; "
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)))); main()"
    )
    environment = {"COMP_WORDS": "asyncpp\nlogs\nmine\ns", "COMP_CWORD": "3"}
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ) | environment | {"_ASYNCPP_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.split("\n")[:2] == ["sync-s0", "[]"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_works_in_bash(folder: Path) -> None:
    commands = folder / "bin"
    commands.mkdir()
    (commands / "asyncpp").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m asyncpp_cli "$@"\n')
    (commands / "asyncpp").chmod(0o755)
    script = (
        'eval "$(asyncpp completion bash)"; COMP_WORDS=(asyncpp logs mine la); COMP_CWORD=3; '
        'complete -p asyncpp >&2; _asyncpp_completion; printf "%s|" "${COMPREPLY[@]}"'
    )
    path = f"{commands}:{os.environ['PATH']}"
    asked = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=dict(os.environ) | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout == "late-s0|"
    assert "-F _asyncpp_completion asyncpp" in asked.stderr


def test_an_unknown_shell_is_refused() -> None:
    refused = asyncpp("completion", "fish")
    assert (refused.code, refused.output) == (2, "")
