"""PYTHONPATH of started processes has no empty entries, which Python reads as the working folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.launches import StartLaunch, sweep

from asyncpp_cli.sites.resources import import_path, import_path_in_bash


@pytest.mark.parametrize(
    ("inherited", "path"),
    [
        (None, "own"),
        ("", "own"),
        (":", "own"),
        (":::", "own"),
        ("/a b", "own:/a b"),
        (":/a", "own:/a"),
        ("/a:", "own:/a"),
        ("/a::/b:::$(c)", "own:/a:/b:$(c)"),
    ],
)
def test_empty_entries_are_dropped_here_and_in_a_job(
    inherited: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if inherited is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", inherited)
    assert import_path("own") == path
    script = "\n".join(["set -eu", *import_path_in_bash("own"), "printenv PYTHONPATH"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}\n"


def test_ranks_import_nothing_from_the_working_folder(
    tmp_path: Path, start_launch: StartLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read at the start of every Python process that finds it.
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    one = ["matrix.schedule=[1f1b]", "matrix.optimizer=[adamw]", "matrix.error_feedback=[false]"]
    experiment = sweep(tmp_path / "e", *one, "train.steps=2")
    launched = start_launch(experiment.folder, "--replay")
    assert launched.finish(seconds=250) == 0, launched.errors
    assert not (tmp_path / "imported").exists()
