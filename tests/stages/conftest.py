from pathlib import Path

import pytest
from support.small_runs import TEXT


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of text to train on; what is prepared from it goes away with it."""
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path
