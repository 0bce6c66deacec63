"""Own code is part of a run's identity: edited code is another run, and is neither trained nor averaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import launches
from support.command_line import asyncpp, refusal, succeeded
from support.files import write_program
from support.launches import TINY
from support.rows import plain

import asyncpp as python_api
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.version import stamp_of
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.settings import with_settings
from stages.config.limits import ConfigError
from stages.config.own_code import code_sha256, own_code
from stages.config.run_config import RunConfig, changed
from stages.resolve.checks import check

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
    return changed(found, {"schedule.name": "1f1b", "optimizer.name": "rules.sgd:make"})


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
    found = changed(found, {"optimizer.name": "torch.optim:NAdam"})
    assert own_code(found) == {}


def sweep(folder: Path, seeds: str) -> list[str | Path]:
    one = ["matrix.schedule=[1f1b]", "matrix.optimizer=[rules.sgd:make]", "matrix.error_feedback=[false]"]
    return ["sweep", "quickstart", *TINY, *one, f"matrix.seed={seeds}", "train.steps=2", "--out", folder]


@pytest.mark.slow
def test_edited_code_is_neither_trained_nor_averaged(rules: Path, tmp_path: Path) -> None:
    (rules / ".env").write_text("KEY=")
    (rules / "gone.key").write_text("a private key")
    committed(rules)
    (rules / ".env").write_text("KEY=a secret")
    (rules / "gone.key").unlink()
    write_rules(rules, factor=3)
    old, new = tmp_path / "old", tmp_path / "new"
    succeeded(*sweep(old, "[0,1]"))
    run, later = open_experiment(old).runs
    assert (run.code / "rules" / "factors.py").read_text() == "FACTOR = 3\n"
    changes = (run.code / "changes.diff").read_text()
    assert ("+FACTOR = 3" in changes, "unused.py" in changes) == (True, False)
    recorded = json.loads((run.code / "repository.json").read_text())
    assert recorded["commit"].endswith("-dirty")
    # What is not copied may hold secrets, and is known by its hash alone.
    others = {name: sha256((rules / name).read_bytes()).hexdigest() for name in (".env", "rules/unused.py")}
    assert recorded["other_changes"] == {**others, "gone.key": None}
    files = [file.read_bytes() for file in old.rglob("*") if file.is_file()]
    assert not any(b"a secret" in content or b"a private key" in content for content in files)
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
    hashes = [plain(each)[0]["code_sha256"]["optimizer"] for each in (run, edited)]
    assert hashes == [each.config().optimizer.code_sha256 for each in (run, edited)]
    reported = asyncpp("report", old, new)
    assert "Runs that also differ in optimizer.code_sha256 were not averaged" in reported.output
    assert all(str(value) in reported.output for value in hashes)
    assert "optimizer.code_sha256" in asyncpp("diff", run.folder, edited.folder).output


def committed(folder: Path) -> None:
    """Make a folder a git repository that has one commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)


PROGRAMS = [
    *(f"filter.mine.{name}" for name in ("clean", "smudge", "process")),
    *(f"diff.mine.{name}" for name in ("textconv", "command")),
    *(f"core.{name}" for name in ("fsmonitor", "pager", "editor", "sshCommand", "askPass")),
    *("diff.external", "gpg.program", "pager.diff", "pager.tag", "interactive.diffFilter"),
]
"""Settings of git that name a program."""
OTHER_SETTINGS = {
    "alias.diff": "!{programs}/alias",
    "remote.origin.url": "ext::{programs}/remote",
    "remote.origin.promisor": "true",
    "remote.origin.partialCloneFilter": "blob:none",
    "extensions.partialClone": "origin",
}


@pytest.mark.parametrize("owner", ["me", "another"])
def test_no_program_that_a_repository_names_is_run(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    part, ran = rules / "part", tmp_path / "ran"
    part.mkdir()
    ran.mkdir()
    for repository in (part, rules):
        (repository / "data.txt").write_text("first\n")
        (repository / ".gitattributes").write_text("* filter=mine diff=mine\n")
        committed(repository)
    for repository in (part, rules):
        programs = repository / ".git" / "hooks"
        hooks = [file.name.removesuffix(".sample") for file in programs.iterdir()]
        for name in (*PROGRAMS, *hooks, "alias", "remote"):
            write_program(programs / name, f"touch {ran}/{name}", "exit 1")
        settings = {name: f"{programs}/{name}" for name in PROGRAMS}
        settings |= {name: value.format(programs=programs) for name, value in OTHER_SETTINGS.items()}
        included = repository / ".git" / "included"
        for key, value in settings.items():
            subprocess.run(["git", "config", "--file", included, key, value], check=True)
        subprocess.run(["git", "-C", repository, "config", "include.path", "included"], check=True)
        (repository / "data.txt").write_text("other\n")
    write_rules(rules, factor=3)
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"{rules}/.git/hooks/diff.external")
    monkeypatch.setenv("GIT_DIR", f"{part}/.git")  # as in a hook of another repository
    environment = {name: value for name, value in os.environ.items() if name != "GIT_DIR"}
    subprocess.run(["git", "-C", rules, "diff"], capture_output=True, check=False, env=environment)
    assert {"core.fsmonitor", *PROGRAMS[:3]} & {file.name for file in ran.iterdir()}, "nothing to see"
    for file in ran.iterdir():
        file.unlink()
    if owner == "another":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        shutil.chown(rules / ".git", 65534)
    succeeded(*sweep(tmp_path / "e", "[0]"))
    assert list(ran.iterdir()) == []
    [run] = open_experiment(tmp_path / "e").runs
    assert (run.code / "rules" / "factors.py").exists()
    assert (run.code / "repository.json").exists() == (owner == "me")
    if owner == "me":
        recorded = json.loads((run.code / "repository.json").read_text())
        assert recorded["commit"].endswith("-dirty")
        assert recorded["other_changes"].keys() == {"data.txt", "rules/unused.py"}
    assert stamp_of(rules).commit == (recorded["commit"] if owner == "me" else None)
    assert list(ran.iterdir()) == []


TEMPLATE = {
    "name": "given",
    "model": "nano",
    "schedule": "1f1b",
    "optimizer": "adamw",
    "data.context": 8,
    "train.steps": 2,
}
SIZES = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32, "vocab_size": 256}
MAKE = "given.schedule:make"
CODE = "import pathlib\npathlib.Path({ran!r}).touch()\ndef make(*_, **options): raise SystemExit(3)\n"


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody else's templates and of a package that leaves a file where it is imported."""
    folder = tmp_path / "given"
    (folder / "given").mkdir(parents=True)
    for name in ("__init__", "schedule", "model"):
        (folder / "given" / f"{name}.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    (folder / "model.yaml").write_text(yaml.safe_dump(SIZES | {"factory": "given.model:make"}))
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"schedule": MAKE}, f"schedule.name {MAKE}"),
        ({"matrix": {"optimizer": ["adamw", MAKE]}}, f"optimizer.name {MAKE}"),
        ({"zip": {"schedule": [MAKE], "seed": [1]}}, f"schedule.name {MAKE}"),
        ({"include": [{"schedule": MAKE}]}, f"schedule.name {MAKE}"),
        ({"overrides": [{"set": {"optimizer": "given:make"}}]}, "optimizer.name given:make"),
        ({"model": "model.yaml"}, "model.factory given.model:make"),
        ({"optimizer": "torch.hub:load"}, "optimizer.name torch.hub:load"),
        ({"schedule": "asyncpp_cli.main:main"}, "schedule.name asyncpp_cli.main:main"),
    ],
)
def test_code_that_a_template_names_is_imported_only_if_its_user_names_it(
    changes: dict[str, Any], names: str, given: Path, tmp_path: Path
) -> None:
    template = given / "t.yaml"
    template.write_text(yaml.safe_dump(TEMPLATE | changes))
    module = names.split()[1].partition(":")[0]
    for words in (
        ["sweep", template, "--list", "speed_steps=10"],
        ["sweep", template, "--out", tmp_path / "e"],
        ["sweep", template, "--list", "--allow-code", "given.other,schedule,make"],
        ["tune", template, "--over", "optimizer.lr=1e-3:1e-2", "--dry-run"],
        ["plan", template, "--gpus", "2"],
    ):
        refused = refusal(*words)
        assert f"names code that would run on this machine: {names} (" in refused
        assert refused.endswith(f"if you trust it, add --allow-code {module}\n")
    with pytest.raises(UserError, match=f"add --allow-code {module}$"):
        python_api.sweep(template, out=tmp_path / "e")
    assert not (tmp_path / "ran").exists()
    if not module.startswith("given"):
        return
    # As the message says, or with the name in a setting of the command line.
    for confirmed in (["--allow-code", module], ["--allow-code", "other", "--allow-code", "given"]):
        ended = asyncpp("sweep", template, "--list", *confirmed)
        assert f"note: {template} runs code of your own: {names} (" in ended.errors
    if "model" not in names:
        assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["antigravity:geohash", "os.path:join", "test.support:run_unittest"])
def test_pythons_own_library_is_refused(name: str, given: Path) -> None:
    for key in ("schedule.name", "optimizer.name", "model.factory"):
        (given / "t.yaml").write_text(yaml.safe_dump(TEMPLATE | {key.removesuffix(".name"): name}))
        allowed = ["--allow-code", name.partition(":")[0]]
        says = f"t.yaml: {key}: {name} is of Python's own library; accepted: code of your own"
        assert says in refusal("sweep", given / "t.yaml", "--list", *allowed)
    # Of a run, too, whose configuration somebody may have written.
    for key in ("schedule.name", "optimizer.name", "model.factory"):
        changed = RunConfig()
        changed = with_settings(changed, {key: name})
        with pytest.raises(ConfigError, match=f"{key}: {name} is of Python's own library"):
            check(changed)
    assert not {"antigravity", "test.support"} & sys.modules.keys()


@pytest.mark.slow
def test_an_experiment_records_what_was_confirmed(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, folder = rules / "t.yaml", tmp_path / "e"
    template.write_text(yaml.safe_dump(TEMPLATE | {"optimizer": "rules.sgd:make"}))
    python_api.sweep(template, out=folder, allow_code="rules")
    [run] = open_experiment(folder).runs
    succeeded("sweep", folder / "template.yaml", "--out", folder)
    # One that was made before confirmations is launched as it was, and names what a sweep needs.
    content = json.loads((folder / "experiment.json").read_text())
    del content["allowed_code"], content["checksum"]
    (folder / "experiment.json").write_text(json.dumps(content))
    again = ["sweep", folder / "template.yaml", "--out", folder]
    assert "add --allow-code rules.sgd\n" in refusal(*again)
    succeeded("launch", folder, "--replay")
    succeeded(*again, "matrix.seed=[0,1]", "--allow-code", "rules.sgd")
    # What others have named runs where it is trained, not where it is looked at.
    (rules / "rules" / "__init__.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    for name in [name for name in sys.modules if name.partition(".")[0] == "rules"]:
        monkeypatch.delitem(sys.modules, name)
    for words in (["status"], ["report"], ["diff", folder], ["report", "--format", "json"]):
        succeeded(words[0], folder, *words[1:])
    succeeded("logs", run.folder)
    assert not (tmp_path / "ran").exists()


def test_a_run_without_own_code_has_no_copy_and_its_old_id(tmp_path: Path) -> None:
    runs = launches.sweep(tmp_path / "e", "train.steps=2").runs
    assert not any(run.code.exists() for run in runs)
    assert {run.config().optimizer.code_sha256 for run in runs} == {None}
