"""Own code is part of a run's identity: edited code is another run, and is neither trained nor averaged."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.launches import TINY

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from stages.config import RunConfig
from stages.own_code import code_sha256, own_code

OPTIMIZER = """
import json, torch
from rules.scaling import scaled

def make(groups, *, lr, weight_decay):
    return torch.optim.SGD([{**g, "params": [p for _, p in g["params"]]} for g in groups], lr=scaled(lr))
"""
SCALING = "from . import factors\n\ndef scaled(lr):\n    return lr * factors.FACTOR\n"


def write_rules(folder: Path, *, factor: int) -> None:
    rules = folder / "rules"
    rules.mkdir(parents=True, exist_ok=True)
    (rules / "__init__.py").write_text("")
    (rules / "sgd.py").write_text(OPTIMIZER)
    (rules / "scaling.py").write_text(SCALING)
    (rules / "factors.py").write_text(f"FACTOR = {factor}\n")
    (rules / "unused.py").write_text(f"number = {factor}\n")


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package with an optimizer of the user's own."""
    folder = tmp_path / "own"
    write_rules(folder, factor=1)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return folder


def config() -> RunConfig:
    found = RunConfig()
    found.schedule.name, found.optimizer.name = "1f1b", "rules.sgd:make"
    return found


def test_the_hash_is_of_the_module_and_of_what_it_imports_from_its_package(rules: Path) -> None:
    files = own_code(config())["optimizer"]
    assert sorted(files) == ["rules", "rules.factors", "rules.scaling", "rules.sgd"]
    first = code_sha256(files)
    (rules / "rules" / "unused.py").write_text("number = 7\n")
    assert code_sha256(own_code(config())["optimizer"]) == first
    (rules / "rules" / "factors.py").write_text("FACTOR = 2\n")
    assert code_sha256(own_code(config())["optimizer"]) != first
    moved = {name: rules.parent / "moved" / file.relative_to(rules) for name, file in files.items()}
    write_rules(rules, factor=1)
    shutil.copytree(rules, rules.parent / "moved")
    assert code_sha256(moved) == first


def test_code_of_torch_is_none_of_ones_own() -> None:
    found = config()
    found.optimizer.name = "torch.optim:NAdam"
    assert own_code(found) == {}


def sweep(folder: Path, seeds: str) -> list[str | Path]:
    one = ["matrix.schedule=[1f1b]", "matrix.optimizer=[rules.sgd:make]", "matrix.error_feedback=[false]"]
    return ["sweep", "quickstart", *TINY, *one, f"matrix.seed={seeds}", "train.steps=2", "--out", folder]


def test_edited_code_is_neither_trained_nor_averaged(rules: Path, tmp_path: Path) -> None:
    git = ["git", "-C", str(rules), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    write_rules(rules, factor=3)
    old, new = tmp_path / "old", tmp_path / "new"
    succeeded(*sweep(old, "[0,1]"))
    run, later = open_experiment(old).runs
    assert (run.code / "rules" / "factors.py").read_text() == "FACTOR = 3\n"
    assert "+FACTOR = 3" in (run.code / "changes.diff").read_text()
    assert json.loads((run.code / "repository.json").read_text())["commit"].endswith("-dirty")
    shutil.move(later.folder, tmp_path / "aside")
    assert asyncpp("launch", old, "--replay").code != 2
    shutil.move(tmp_path / "aside", later.folder)
    write_rules(rules, factor=2)

    assert "own code (rules, rules.factors, rules.scaling, rules.sgd) has changed" in refusal(
        "launch", old, "--replay"
    )
    assert later.status().attempt == 0
    assert "own code that was edited" in refusal(*sweep(old, "[0,1,2]"))

    succeeded(*sweep(new, "[1]"))
    succeeded("launch", new, "--replay")
    [edited] = open_experiment(new).runs
    hashes = [each.metrics()[0]["code_sha256"]["optimizer"] for each in (run, edited)]
    assert hashes == [each.config().optimizer.code_sha256 for each in (run, edited)]
    reported = asyncpp("report", old, new)
    assert "Runs that also differ in optimizer.code_sha256 were not averaged" in reported.output
    assert all(str(value) in reported.output for value in hashes)
    assert "optimizer.code_sha256" in asyncpp("diff", run.folder, edited.folder).output


def test_a_run_without_own_code_has_no_copy_and_its_old_id(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    succeeded("sweep", "quickstart", *TINY, "train.steps=2", "--out", folder)
    runs: list[Run] = open_experiment(folder).runs
    assert not any(run.code.exists() for run in runs)
    assert {run.config().optimizer.code_sha256 for run in runs} == {None}
