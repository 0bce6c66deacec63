"""asyncpp as it is installed: which code it says it is, and others that use its packages' names."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command_line import Ended, ran
from support.files import ROOT

from asyncpp_cli.base.version import (
    RELEASE,
    STAMP_FILE,
    Stamp,
    asyncpp_version,
    stamp_of,
    write_stamp,
)

BUILD = "import sys; from setuptools import build_meta; print(build_meta.{what}(sys.argv[1]))"

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    done = ran("git", "-C", folder, *who, *arguments)
    assert done.code == 0, done.errors
    return done.output.strip()


def built(what: str, tree: Path, folder: Path) -> Path:
    """Build a distribution of the tree, as pip does."""
    folder.mkdir(exist_ok=True)
    done = ran(sys.executable, "-W", "ignore", "-c", BUILD.format(what=what), folder, cwd=tree)
    assert done.code == 0, done.errors
    return folder / done.output.splitlines()[-1]


@dataclass(frozen=True)
class Installed:
    """A folder of installed packages, with asyncpp in it."""

    site: Path
    commit: str

    def run(self, *arguments: str, cwd: Path) -> Ended:
        environment = os.environ | {"PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"}
        return ran(sys.executable, "-m", "asyncpp_cli", *arguments, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """asyncpp built from a checkout into a source distribution, and from that into a wheel."""
    folder = tmp_path_factory.mktemp("installed")
    tree = folder / "tree"
    leave = shutil.ignore_patterns("__pycache__", "tests", "benchmarks", "docs", "build", "*.egg-info", ".*")
    shutil.copytree(ROOT, tree, ignore=leave)
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "first")
    source = built("build_sdist", tree, folder / "source")
    shutil.unpack_archive(source, folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    wheel = built("build_wheel", unpacked, folder / "wheel")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "site")
    return Installed(folder / "site", git(tree, "rev-parse", "--short=12", "HEAD"))


@needs_git
@pytest.mark.slow
def test_an_installation_says_of_which_commit_it_is(whole: Installed, tmp_path: Path) -> None:
    [metadata] = whole.site.glob("asyncpp-*.dist-info/METADATA")
    version = f"{RELEASE}+g{whole.commit}"
    assert f"\nVersion: {version}\n" in metadata.read_text()
    assert whole.run("--version", cwd=tmp_path).output == f"asyncpp {version}\n"
    assert stamp_of(whole.site) == Stamp(whole.commit)


@needs_git
def test_a_release_is_called_by_its_tag_and_other_commits_are_not(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("one = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert stamp_of(tmp_path).version == f"{RELEASE}+g{head}"
    git(tmp_path, "tag", f"v{RELEASE}")
    assert stamp_of(tmp_path) == Stamp(head, released=True)
    assert stamp_of(tmp_path).version == RELEASE
    (tmp_path / "notes.txt").write_text("untracked")
    assert stamp_of(tmp_path).commit == head
    (tmp_path / "code.py").write_text("one = 2\n")
    assert stamp_of(tmp_path).version == f"{RELEASE}+g{head}.dirty"
    (tmp_path / ".git" / "HEAD").unlink()
    assert stamp_of(tmp_path).commit is None


@pytest.mark.parametrize(
    "damage", [None, "", "[]", "{}", '{"commit": 1, "released": true}', '{"commit": "; rm"}']
)
def test_without_a_checkout_and_without_a_stamp_the_commit_is_unknown(
    tmp_path: Path, damage: str | None
) -> None:
    (tmp_path / "asyncpp_cli").mkdir()
    if damage is not None:
        (tmp_path / "asyncpp_cli" / STAMP_FILE).write_text(damage)
    assert stamp_of(tmp_path).version == RELEASE
    write_stamp(Stamp("0123456789ab-dirty"), tmp_path)
    assert stamp_of(tmp_path).version == f"{RELEASE}+g0123456789ab.dirty"


def own_packages(folder: Path) -> Path:
    """A user's folder with packages and modules of our packages' names, which must not be imported."""
    for name in ("optimizers", "schedules"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    (folder / "stages.py").write_text("raise SystemExit('the wrong module')\n")
    return folder


@needs_git
@pytest.mark.slow
def test_a_folder_with_packages_of_the_users_own_is_of_no_consequence(
    whole: Installed, tmp_path: Path
) -> None:
    mine = own_packages(tmp_path / "mine")
    installed = whole.run("optimizers", "list", cwd=mine)
    assert (installed.code, "adamw" in installed.output) == (0, True), installed.errors
    ours = os.environ | {"PYTHONPATH": str(ROOT)}
    editable = ran(sys.executable, "-m", "asyncpp_cli", "--version", cwd=mine, env=ours)
    assert (editable.code, editable.output) == (0, f"asyncpp {asyncpp_version()}\n"), editable.errors
