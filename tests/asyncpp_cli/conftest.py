"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of data is kept below the test's own folder."""
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / "cache"))
