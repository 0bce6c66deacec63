"""The commit that a run's first row names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from asyncpp_cli.version import commit_of_checkout


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_checkout_names_its_commit_and_whether_it_was_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("one = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v1")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert commit_of_checkout(tmp_path) == head
    (tmp_path / "notes.txt").write_text("of no interest")
    assert commit_of_checkout(tmp_path) == head
    (tmp_path / "code.py").write_text("one = 2\n")
    assert commit_of_checkout(tmp_path) == f"{head}-dirty"
    (tmp_path / ".git" / "HEAD").unlink()
    assert commit_of_checkout(tmp_path) is None
