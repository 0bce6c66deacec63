"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncpp_cli.planner import here


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of data is kept below the test's own folder."""
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is small enough to be measured for its expected time here, which takes seconds."""
    monkeypatch.setattr(here, "_MOST_FLOPS", 0)
