from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_runs import TEXT


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a file of text, and room for what is prepared from it: once for all tests."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def text(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of text to train on."""
    monkeypatch.setenv("ASYNCPP_CACHE", str(text_folder / "cache"))
    return text_folder / "text.txt"


@pytest.fixture(scope="module")
def shared_text(text_folder: Path) -> Iterator[Path]:
    """The same for fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCPP_CACHE", str(text_folder / "cache"))
        yield text_folder / "text.txt"
