"""Token shards of other projects: read in place, and refused with file and place where they are damaged."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_runs import replayed, small_config
from support.texts import write_llm_c, write_megatron, write_nanogpt, write_shards

from stages.config.run_config import DataConfig, changed
from stages.data.batches import Batches
from stages.data.dataset import DataError, prepare, vocabulary
from stages.data.integrity import write_checksummed
from stages.data.shards import Shard, Tokens, count, cut
from stages.resolve.checks import ConfigError, check

TRAIN = [(7 * i + i * i) % 1000 for i in range(3000)]
VALIDATION = [(11 * i) % 900 for i in range(500)]


def write_folder(folder: Path, kind: str) -> Path:
    return write_shards(folder, kind, train=TRAIN, validation=VALIDATION)


def all_tokens(shards: tuple[Shard, ...]) -> list[int]:
    tokens = Tokens(shards)
    return tokens.rows(np.zeros(1, np.int64), length=len(tokens))[0].tolist()


@pytest.mark.parametrize("kind", ["llm.c", "nanogpt", "megatron"])
def test_every_format_gives_the_tokens_that_were_written(kind: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "data", kind)
    # Of 3500 tokens in documents of 1000, 2000 and 500, a tenth held out by whole documents is the last.
    config = DataConfig(path=str(path), context=16, validation_share=0.1)
    corpus = prepare(config, cache=tmp_path / "cache")
    assert all_tokens(corpus.train) == TRAIN
    assert all_tokens(corpus.validation) == VALIDATION
    assert vocabulary(config, cache=tmp_path / "cache") == max(TRAIN) + 1


def test_a_last_document_of_more_than_twice_the_share_is_cut(tmp_path: Path) -> None:
    documents = [list(range(1000)), list(range(9000))]
    write_megatron(tmp_path / "x.bin", documents)
    for share, held_out in ((0.05, 500), (0.4, 4000), (0.5, 9000)):
        config = DataConfig(path=str(tmp_path / "x.bin"), context=16, validation_share=share)
        corpus = prepare(config, cache=tmp_path / "cache")
        assert (count(corpus.train), count(corpus.validation)) == (10_000 - held_out, held_out)


def test_the_same_tokens_give_the_same_run_in_every_format(tmp_path: Path) -> None:
    weights = []
    for kind in ("llm.c", "nanogpt", "megatron"):
        config = small_config(text=write_folder(tmp_path / kind, kind), steps=2)
        config = changed(config, {"data.validation_share": 0.1, "model.vocab_size": 1008})
        check(config)
        rows = replayed(config)
        weights.append(rows.result.weights)
        [start] = rows.of_kind("start")
        assert start["bytes_per_token"] is None
    for other in weights[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in weights[0].items())


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), data=st.data())
@settings(max_examples=50, deadline=None)
def test_windows_over_shards_are_windows_over_their_concatenation(
    sizes: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    whole = np.arange(sum(sizes))
    shards = []
    for index, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        file = folder / f"{index}.bin"
        file.write_bytes(b"head" + whole[end - size : end].astype("<u2").tobytes())
        shards.append(Shard(file=file, dtype="uint16", header=4, tokens=size))
    length = data.draw(st.integers(1, len(whole)))
    starts = np.asarray(data.draw(st.lists(st.integers(0, len(whole) - length), max_size=5)), dtype=np.int64)
    rows = Tokens(shards).rows(starts, length=length)
    assert rows.tolist() == [whole[start : start + length].tolist() for start in starts]
    at = data.draw(st.integers(0, len(whole)))
    before, after = cut(shards, at=at)
    assert all_tokens(before) + all_tokens(after) == whole.tolist()
    assert len(all_tokens(before)) == at


def raw_tokens(vocab_size: int, count: int) -> np.ndarray:
    """Tokens of which smaller ones are more frequent, as in text."""
    return (vocab_size * np.random.default_rng(vocab_size).random(count) ** 4).astype(np.int64)


def raw_file(folder: Path, tokens: np.ndarray, dtype: str) -> DataConfig:
    tokens.astype(dtype).tofile(folder / "tokens.bin")
    return DataConfig(path=str(folder / "tokens.bin"), context=8, validation_share=0.2)


@pytest.mark.parametrize("count", [100, 5000, 300_000])
@pytest.mark.parametrize("vocab_size", [6, 65, 256, 1000, 32_000, 50_257, 128_256, 262_144])
def test_tokens_without_a_header_are_of_16_bits_or_refused(
    vocab_size: int, count: int, tmp_path: Path
) -> None:
    tokens = raw_tokens(vocab_size, count)
    padded = np.where(np.arange(count) % 100 < 95, 0, tokens)
    for each in (tokens, padded, np.zeros(count, int)) if vocab_size < 2**16 else ():
        corpus = prepare(raw_file(tmp_path, each, "<u2"), cache=tmp_path / "c")
        assert all_tokens(corpus.train) + all_tokens(corpus.validation) == each.tolist()
    negative = np.where(np.arange(count) % 50 == 7, -100, tokens)
    for each, dtype, says in (
        (tokens, "<u4", "tokens of 32 bits; accepted: data.dtype: uint32 or int32, or data.dtype: uint16"),
        (negative, "<i4", "tokens of 32 bits; accepted: data.dtype: uint32 or int32, or data.dtype: uint16"),
        (tokens, "<i8", "tokens of 64 bits; accepted: data.dtype: int64"),
        (tokens, ">u4", "big-endian tokens of 32 bits; accepted: little-endian"),
        (tokens, ">i8", "big-endian tokens of 64 bits; accepted: little-endian"),
    ):
        with pytest.raises(DataError, match=f"tokens.bin has no header, .*: it seems to hold {says}"):
            prepare(raw_file(tmp_path, each, dtype), cache=tmp_path / "c")


def test_the_type_of_tokens_without_a_header_can_be_said(tmp_path: Path) -> None:
    text = (Path(__file__).read_text() + "naïve").encode()
    for dtype, tokens in (
        ("uint8", np.frombuffer(text, np.uint8)),
        *((dtype, raw_tokens(50_257, 5000)) for dtype in ("uint16", "uint32", "int32", "int64")),
    ):
        config = raw_file(tmp_path, tokens, dtype)
        if dtype != "uint16":
            with pytest.raises(DataError, match=f"accepted: data.dtype: .*{dtype}"):
                prepare(config, cache=tmp_path / "c")
        known = replace(config, dtype=dtype, validation={"other": str(tmp_path / "tokens.bin")})
        corpus = prepare(known, cache=tmp_path / "c")
        assert all_tokens(corpus.train) + all_tokens(corpus.validation) == tokens.tolist()
        assert all_tokens(corpus.sets["other"].shards) == tokens.tolist()
        assert vocabulary(known, cache=tmp_path / "c") == tokens.max() + 1
    cut_short(tmp_path / "tokens.bin", 2)
    with pytest.raises(DataError, match=r"should hold tokens of type int64 .*must be a multiple of 8"):
        prepare(known, cache=tmp_path / "c")
    with pytest.raises(DataError, match="big-endian tokens of 16 bits; accepted: little-endian"):
        prepare(raw_file(tmp_path, raw_tokens(50_257, 5000), ">u2"), cache=tmp_path / "c")
    write_llm_c(tmp_path / "tokens.bin", TRAIN)
    np.fromfile(tmp_path / "tokens.bin", "<i4").astype(">i4").tofile(tmp_path / "tokens.bin")
    with pytest.raises(DataError, match="is big-endian"):
        prepare(config, cache=tmp_path / "c")


def test_one_file_without_validation_holds_out_its_end(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    write_nanogpt(file, TRAIN)
    corpus = prepare(DataConfig(path=str(file), context=8, validation_share=0.2), cache=tmp_path)
    assert all_tokens(corpus.train) == TRAIN[:2400]
    assert all_tokens(corpus.validation) == TRAIN[2400:]


def test_validation_batches_come_from_the_validation_shard(tmp_path: Path) -> None:
    config = small_config(text=write_folder(tmp_path / "d", "llm.c"))
    data = Batches(config, prepare(config.data, cache=tmp_path), device=torch.device("cpu"))
    tokens, targets = data.validation(0, count=1)
    assert tokens[0].tolist() == VALIDATION[:12]
    assert targets[-1].tolist() == VALIDATION[-12:]


def cut_short(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:-count])


def patch(file: Path, at: int, content: bytes) -> None:
    raw = bytearray(file.read_bytes())
    raw[at : at + len(content)] = content
    file.write_bytes(raw)


IDX = "text_document.idx"


@pytest.mark.parametrize(
    ("kind", "damage", "says"),
    [
        ("llm.c", lambda d: cut_short(d / "text_train_000002.bin", 2), "train_000002.bin is truncated"),
        (
            "llm.c",
            lambda d: patch(d / "text_val_000000.bin", 4, b"\x09"),
            "val_000000.bin: header has version 9",
        ),
        ("nanogpt", lambda d: cut_short(d / "val.bin", 1), "val.bin has 999 bytes and no header"),
        ("nanogpt", lambda d: (d / "train.bin").unlink(), "validation shards only"),
        ("nanogpt", lambda d: (d / "val.bin").write_bytes(b""), "val.bin has 0 bytes"),
        ("megatron", lambda d: cut_short(d / "text_document.bin", 4), "do not belong together"),
        ("megatron", lambda d: cut_short(d / IDX, 8), "idx is truncated"),
        ("megatron", lambda d: cut_short(d / IDX, 120), "no Megatron index"),
        ("megatron", lambda d: patch(d / IDX, 0, b"X"), "no Megatron index"),
        ("megatron", lambda d: patch(d / IDX, 9, b"\x02"), "version 2 at byte 9"),
        ("megatron", lambda d: patch(d / IDX, 17, b"\x07"), "tokens of type 7 at byte 17"),
        ("megatron", lambda d: patch(d / IDX, 17, b"\x08"), "do not belong together"),
        (
            "megatron",
            lambda d: patch(d / IDX, 46 + 8, struct.pack("<q", 8)),
            "sequence 1 is said to begin at",
        ),
        ("megatron", lambda d: patch(d / IDX, 34, struct.pack("<i", -5)), "sequence 0 has a negative length"),
        ("megatron", lambda d: patch(d / IDX, 70, struct.pack("<q", 9)), "bounds of documents"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_place(
    kind: str, damage: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    path = write_folder(folder, kind)
    damage(folder)
    with pytest.raises(DataError, match=says):
        vocabulary(DataConfig(path=str(path), context=8), cache=tmp_path / "cache")


def test_a_vocabulary_that_is_too_small_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = small_config(text=write_folder(tmp_path / "d", "nanogpt"))
    with pytest.raises(ConfigError, match=r"model.vocab_size: is 256, the data in .*/d needs 999 or more"):
        check(config)
    check(replace(config, model=replace(config.model, vocab_size=999)))


def test_tokens_below_zero_are_refused_with_their_place(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x.bin", [[5, 6, 7], [8, -1, 9]])
    with pytest.raises(DataError, match=r"x.bin holds -1 at byte 16 \(token 4\)"):
        vocabulary(DataConfig(path=str(tmp_path / "x.bin"), context=1, validation_share=0.4), cache=tmp_path)


def test_a_file_is_read_whole_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "data", "nanogpt")
    config = DataConfig(path=str(path), context=8)
    cache = tmp_path / "cache"
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))  # of a file that is newer nothing is kept
    assert vocabulary(config, cache=cache) == max(TRAIN) + 1
    for entry in (cache / "shards").iterdir():
        known = json.loads(entry.read_text())
        # Forged with a right seal: that it is believed shows that the file is not read again.
        write_checksummed(entry, {**known, "largest": min(known["largest"], 899)})
    assert vocabulary(config, cache=cache) == max(VALIDATION) + 1
    write_nanogpt(path / "train.bin", [*TRAIN, 2000])
    assert vocabulary(config, cache=cache) == 2001
