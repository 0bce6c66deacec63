"""A trained run that tests of exported weights share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.templates import run_of

from asyncpp_cli.runs.run_folder import Run


@pytest.fixture(scope="package")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(Path(__file__).read_text() * 12)
    return file


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Run:
    return run_of(tmp_path_factory.mktemp("run") / "r", text, stages=2)
