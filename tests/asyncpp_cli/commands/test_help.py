"""The command line starts without what is slow to import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from asyncpp_cli.version import asyncpp_version

SLOW = {
    *("torch", "submitit", "polars", "matplotlib", "pytorch_optimizer"),
    *("tensorboard", "wandb", "tokenizers", "zstandard"),
}

ASK = """
import json, sys
from asyncpp_cli.main import main
try:
    main()
except SystemExit as ended:
    print(json.dumps([ended.code, sorted(sys.modules)]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["quickstart"],
        ["sweep"],
        ["launch"],
        ["status"],
        ["logs"],
        ["cancel"],
        ["retry"],
        ["report"],
        ["diff"],
        ["export"],
        ["plan"],
        ["profile"],
        ["mirror"],
        ["train"],
        ["doctor"],
        ["data"],
        ["data", "prepare"],
        ["data", "inspect"],
        ["templates"],
        ["templates", "list"],
        ["schedule"],
        ["schedule", "show"],
        ["optimizers"],
        ["theory"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASK, *arguments, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    code, modules = json.loads(asked.stderr.splitlines()[-1])
    assert code == 0
    assert asked.stdout.startswith("Usage:")
    assert not SLOW & set(modules)


@pytest.mark.slow
def test_sweep_and_status_import_nothing_slow(tmp_path: object) -> None:
    for arguments in (["sweep", "quickstart", "--out", f"{tmp_path}/e"], ["status", f"{tmp_path}/e"]):
        asked = subprocess.run(
            [sys.executable, "-c", ASK, *arguments], capture_output=True, text=True, timeout=60, check=True
        )
        code, modules = json.loads(asked.stderr.splitlines()[-1])
        assert code == 0
        assert not SLOW & set(modules)


def test_the_version_is_that_of_the_package() -> None:
    asked = [sys.executable, "-m", "asyncpp_cli", "--version"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert printed == f"asyncpp {asyncpp_version()}\n"
