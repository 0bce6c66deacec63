from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_runs import TEXT, TEXT_FILE


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a file of text, and room for what is prepared from it: once for all tests."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _text(text_folder: Path) -> Iterator[None]:
    """The text that `small_config` trains on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCPP_CACHE", str(text_folder / "cache"))
        patch.setenv(TEXT_FILE, str(text_folder / "text.txt"))
        yield
