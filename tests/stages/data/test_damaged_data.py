"""Data files that are damaged anywhere: refused by name, or the tokens are those that they were."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.json_values import JSON, parts_of, replace_part
from support.small_runs import Rows, small_config
from support.texts import write_nanogpt, write_shards

from stages.config.run_config import DataConfig, changed
from stages.data.dataset import Corpus, DataError, find_corpus, prepare, vocabulary
from stages.data.shards import Tokens, count
from stages.rows import Row, Step
from stages.trainer import replay

TRAIN = [(7 * i + i * i) % 1000 for i in range(600)]
VALIDATION = [(11 * i) % 900 for i in range(100)]
KINDS = ("llm.c", "nanogpt", "megatron", "prepared")


def write_prepared(folder: Path, splits: dict[str, list[int]]) -> None:
    folder.mkdir()
    described = {}
    for name, tokens in splits.items():
        file = folder / f"{name}-000000.bin"
        np.array(tokens, dtype="<u2").tofile(file)
        shard = {
            "file": file.name,
            "tokens": len(tokens),
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        described[name] = {"documents": 1, "tokens": len(tokens), "bytes": 9999, "shards": [shard]}
    content = {
        "format": 1,
        "vocab_size": 1000,
        "dtype": "uint16",
        "tokenizer": {"name": "some", "file": None, "sha256": None, "end_of_document": 0},
        "unigram_bits_per_byte": 4.5,
        "splits": described,
    }
    (folder / "manifest.json").write_text(json.dumps(content))


def tokens_of(corpus: Corpus) -> list[bytes]:
    return [
        Tokens(shards).rows(np.array([0]), length=count(shards)).tobytes()
        for shards in (corpus.train, corpus.validation)
    ]


def is_refused(config: DataConfig, cache: Path) -> bool:
    try:
        vocabulary(config, cache=cache)
    except DataError as error:
        return "\n" not in str(error)
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str, list[bytes]]]:
    """By format: the folder, its checksum, and its tokens."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("data") / kind
        if kind == "prepared":
            write_prepared(folder, {"train": TRAIN, "validation": VALIDATION})
        else:
            write_shards(folder, kind, train=TRAIN, validation=VALIDATION)
        path = folder / "text_document" if kind == "megatron" else folder
        config = DataConfig(path=str(path), context=8, validation_share=0.2)
        corpus = find_corpus(config, cache=tmp_path_factory.mktemp("cache"))
        found[kind] = (folder, corpus.sha256, tokens_of(corpus))
    return found


@settings(max_examples=120)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_damage_is_refused_or_changes_no_token(
    kind: str,
    data: st.DataObject,
    whole: dict[str, tuple[Path, str, list[bytes]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, sha256, tokens = whole[kind]
    damaged = tmp_path_factory.mktemp("t") / kind
    shutil.copytree(folder, damaged)
    file = data.draw(st.sampled_from(sorted(damaged.iterdir())))
    content = file.read_bytes()
    # Headers, indices and manifests are short, and most of what can go wrong is at their beginning.
    place = data.draw(st.integers(0, min(63, len(content) - 1)) | st.integers(0, len(content) - 1))
    new = data.draw(st.binary(min_size=1, max_size=8))
    damages = ["bytes", "cut", "insert", "remove", "other", "folder"]
    match data.draw(st.sampled_from([*damages, *["value"] * 6 * (file.suffix == ".json")])):
        case "bytes":
            file.write_bytes(content[:place] + new + content[place + len(new) :])
        case "cut":
            file.write_bytes(content[:place])
        case "insert":
            file.write_bytes(content[:place] + new + content[place:])
        case "remove":
            file.unlink()
        case "other":
            file.write_bytes(data.draw(st.sampled_from(sorted(folder.iterdir()))).read_bytes())
        case "value":
            changed = json.loads(content)
            replace_part(changed, data.draw(st.sampled_from([*parts_of(changed)])), data.draw(JSON))
            file.write_text(json.dumps(changed))
        case _:
            file.unlink()
            file.mkdir()
    path = damaged / "text_document" if kind == "megatron" else damaged
    config = DataConfig(path=str(path), context=8, validation_share=0.2)
    cache = damaged.parent / "cache"
    is_refused(config, cache)  # as sweep looks at data that it does not know: no traceback
    config = replace(config, sha256=sha256)
    assert is_refused(config, cache) or tokens_of(prepare(config, cache=cache)) == tokens


@settings(max_examples=100)
@given(content=JSON)
def test_any_json_is_no_manifest(content: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("t")
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DataError):
        prepare(DataConfig(path=str(folder), context=8), cache=folder / "cache")


class ChangesData(Rows):
    """Changes the data when the run writes the row of a step."""

    def __init__(self, change: Callable[[], None], *, step: int) -> None:
        super().__init__()
        self._change, self._step = change, step

    def append(self, row: Row) -> None:
        super().append(row)
        if isinstance(row, Step) and row.step == self._step:
            self._change()


def written_over(file: Path, *, keep_time: bool) -> None:
    """Other tokens in the same file, maybe with the time of the former."""
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.write(bytes(stat.st_size))
    if keep_time:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replaced(file: Path) -> None:
    beside = file.with_suffix(".new")
    shutil.copy2(file, beside)
    beside.replace(file)


@pytest.mark.parametrize(
    ("change", "says", "name"),
    [
        (lambda file: written_over(file, keep_time=False), "it was written to", "train.bin"),
        *(
            (lambda file: written_over(file, keep_time=True), "it has other tokens", name)
            for name in ("train.bin", "val.bin", "other.bin")
        ),
        (replaced, "another file is there", "val.bin"),
        (lambda file: os.truncate(file, 200), "200 bytes for|was truncated while it was read", "train.bin"),
        (lambda file: file.write_bytes(file.read_bytes() + b"more"), "bytes for", "other.bin"),
        *((Path.unlink, "", name) for name in ("train.bin", "val.bin")),
    ],
)
def test_data_that_changes_while_a_run_trains_ends_the_run_by_name(
    change: Callable[[Path], object], says: str, name: str, tmp_path: Path
) -> None:
    """In place or not, of the split that is trained on, the held-out one or a further set; what is gone is
    still open, and read."""
    rng = np.random.default_rng(0)
    for file in ("train.bin", "val.bin", "other.bin"):
        write_nanogpt(tmp_path / file, rng.integers(1, 256, 3000).tolist())
    (tmp_path / "sets").mkdir()
    (tmp_path / "other.bin").rename(tmp_path / "sets" / "other.bin")
    config = small_config("1f1b", text=tmp_path, stages=1, eval_interval=2)
    config = changed(config, {"data.validation": {"other": str(tmp_path / "sets")}})
    file = tmp_path / ("sets" if name == "other.bin" else "") / name
    rows = ChangesData(lambda: change(file), step=3)
    if says:
        with pytest.raises(DataError, match=f"{name}.*({says})"):
            replay(config, recorder=rows)
        assert not rows.of_kind("end")
    else:
        before = replay(config, recorder=Rows()).weights
        after = replay(config, recorder=rows).weights
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
