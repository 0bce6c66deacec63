from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_runs import TEXT


def write_text(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.setenv("ASYNCPP_CACHE", str(folder / "cache"))
    path = folder / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of text to train on; what is prepared from it goes away with it."""
    return write_text(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def shared_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        yield write_text(tmp_path_factory.mktemp("text"), patch)
