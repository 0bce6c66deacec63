"""Text kept split in the cache: whole when it is used, made anew where damaged, done without if need be."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.config.run_config import DataConfig
from stages.data.dataset import Corpus, DataError, prepare
from stages.data.integrity import checksum_of, read_checksummed
from stages.data.text import CHECKED, MANIFEST, text_files

WORDS = "a pipeline of stages that never waits takes steps with old gradients .\n" * 40


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text(WORDS)
    return DataConfig(path=str(tmp_path / "a.txt"), context=8, validation_share=0.25)


def content(corpus: Corpus) -> tuple[bytes, bytes]:
    return corpus.train[0].file.read_bytes(), corpus.validation[0].file.read_bytes()


def folder_of(corpus: Corpus) -> Path:
    return corpus.train[0].file.parent


def overwrite_half(folder: Path) -> None:
    file = folder / "train.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] + b"x" * (len(whole) - len(whole) // 2))


def replace_by_file(folder: Path) -> None:
    folder.rename(folder.with_name("aside"))
    folder.write_text("not a folder")


def forged(folder: Path) -> None:
    known = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**known, "train_tokens": known["train_tokens"] - 1}))


@pytest.mark.parametrize(
    "damage",
    [
        overwrite_half,
        replace_by_file,
        forged,
        lambda folder: (folder / "train.bin").write_bytes(b""),
        lambda folder: (folder / "validation.bin").unlink(),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_bytes(b""),
        lambda folder: (folder / MANIFEST).write_text("[" * 100_000),
        lambda folder: (folder / CHECKED).write_text("{}"),
    ],
)
def test_a_damaged_cache_is_made_anew(
    damage: Callable[[Path], object], config: DataConfig, tmp_path: Path
) -> None:
    first = prepare(config, cache=tmp_path / "cache")
    was = content(first)
    damage(folder_of(first))
    again = prepare(config, cache=tmp_path / "cache")
    assert again == first
    assert content(again) == was
    left = {path.name for path in (tmp_path / "cache").iterdir()} - {"aside"}
    assert left == {folder_of(first).name, f"{folder_of(first).name}.lock"}


@given(place=st.integers(0, len(WORDS) - 1), byte=st.integers(0, 255), data=st.data())
@pytest.mark.slow
def test_no_byte_of_the_cache_can_change_unseen(
    place: int, byte: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("t")
    (tmp_path / "a.txt").write_text(WORDS)
    config = DataConfig(path=str(tmp_path / "a.txt"), context=8, validation_share=0.25)
    first = prepare(config, cache=tmp_path / "cache")
    was = content(first)
    file = data.draw(st.sampled_from(sorted(folder_of(first).iterdir())))
    whole = bytearray(file.read_bytes())
    whole[place % len(whole)] = byte
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole)))] if byte % 2 else whole)
    again = prepare(config, cache=tmp_path / "cache")
    assert (again, content(again)) == (first, was)


def test_it_is_read_whole_once_and_then_goes_by_size_and_time(config: DataConfig, tmp_path: Path) -> None:
    first = prepare(config, cache=tmp_path / "cache")
    folder = folder_of(first)
    for ahead in (-10, 0, 10):  # too new for its time to vouch for it, whose clock ever is ahead
        for file in folder.glob("*.bin"):
            os.utime(file, (0, time.time() + ahead))
        assert prepare(config, cache=tmp_path / "cache") == first
        assert not (folder / CHECKED).exists()
    for file in folder.glob("*.bin"):
        os.utime(file, (1e9, 1e9))
    assert prepare(config, cache=tmp_path / "cache") == first
    assert read_checksummed(folder / CHECKED) is not None
    was = content(first)
    overwrite_half(folder)
    os.utime(folder / "train.bin", (1e9, 1e9))
    # Not seen: that shows that it is not read a second time.
    assert content(prepare(config, cache=tmp_path / "cache")) != was
    os.utime(folder / "train.bin", (2e9, 2e9))
    assert content(prepare(config, cache=tmp_path / "cache")) == was


def test_a_cache_that_cannot_be_written_is_done_without(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    corpus = prepare(config, cache=tmp_path / "file" / "cache", spare=tmp_path / "run" / "text")
    assert folder_of(corpus).parent == tmp_path / "run" / "text"
    assert content(prepare(config, cache=tmp_path / "file")) == content(corpus)
    with pytest.raises(DataError, match=r"there is no folder to split the text of .* into .*ASYNCPP_CACHE"):
        prepare(config, cache=tmp_path / "file", spare=tmp_path / "file")


def test_text_that_changes_while_it_is_read_is_refused(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.data import text

    def late(config: DataConfig) -> object:
        described = text_files(config)
        (tmp_path / "a.txt").write_text(WORDS * 2)
        return described

    text_files = text.text_files
    monkeypatch.setattr(text, "text_files", late)
    with pytest.raises(DataError, match="changes while it is read"):
        prepare(config, cache=tmp_path / "cache")


def test_a_link_that_leads_nowhere_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's standard library has a link into /etc, which images may lack."""
    (tmp_path / "a.py").write_text(WORDS)
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "gone.py")
    monkeypatch.setattr("stages.data.text.sysconfig.get_path", lambda name: str(tmp_path))
    _, [file] = text_files(DataConfig(path=None))
    assert file.name == "a.py"


def test_a_seal_does_not_depend_on_the_layout() -> None:
    assert checksum_of({"a": 1, "b": [2.5, None]}) == checksum_of({"b": [2.5, None], "a": 1})
    assert checksum_of({"a": 1}) != checksum_of({"a": 2})
