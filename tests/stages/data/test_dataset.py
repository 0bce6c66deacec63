from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.small_runs import small_config

from stages.config.run_config import DataConfig
from stages.data.batches import Batches
from stages.data.dataset import Corpus, DataError, prepare
from stages.data.shards import count
from stages.data.text import validation_files


def text_of(corpus: Corpus, split: str) -> str:
    [shard] = getattr(corpus, split)
    return shard.file.read_text()


def test_a_single_file_holds_out_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 100)
    corpus = prepare(DataConfig(path=str(path), context=8, validation_share=0.1), cache=tmp_path / "c")
    assert text_of(corpus, "train") == "abcdefghij" * 90
    assert text_of(corpus, "validation") == "abcdefghij" * 10
    assert corpus.unigram_bits_per_byte == pytest.approx(math.log2(10))


def test_a_folder_is_split_by_file_and_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    texts = {f"deeper/{i}.md": f"<{i}>" * 50 for i in range(40)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("secret")
    corpus = prepare(DataConfig(path=str(folder), context=8, validation_share=0.2), cache=tmp_path / "c")
    train, validation = (text_of(corpus, split).split("\n") for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(texts.values())
    assert 1 <= len(validation) <= 8


def test_a_file_of_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 100)
    (tmp_path / "b.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"b\.txt cannot be read"):
        prepare(DataConfig(path=str(tmp_path), context=8), cache=tmp_path.parent / "c")


def test_the_entropy_is_that_of_the_validation_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("aab" * 50 + "aaab" * 50)
    corpus = prepare(DataConfig(path=str(path), context=8, validation_share=0.5), cache=tmp_path / "c")
    text = text_of(corpus, "validation").encode()
    shares = [count / len(text) for count in Counter(text).values()]
    assert corpus.unigram_bits_per_byte == pytest.approx(-sum(p * math.log2(p) for p in shares))


def test_preparing_again_reads_the_cache_and_changed_text_is_prepared_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc" * 100)
    config = DataConfig(path=str(path), context=8)
    first = prepare(config, cache=tmp_path / "c")
    stamp = first.train[0].file.stat().st_mtime_ns
    assert prepare(config, cache=tmp_path / "c") == first
    assert first.train[0].file.stat().st_mtime_ns == stamp
    path.write_text("abd" * 101)
    assert prepare(config, cache=tmp_path / "c").sha256 != first.sha256


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no text"),
        (lambda path: path.write_bytes(b"\0\0\0"), "holds no text"),
        (lambda path: path.write_text("short"), "one sequence needs 9"),
    ],
)
def test_a_path_without_enough_text_is_refused(make: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    make(path)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        prepare(DataConfig(path=str(path), context=8), cache=tmp_path / "c")


def test_the_default_text_needs_nothing_but_python(tmp_path: Path) -> None:
    corpus = prepare(DataConfig(), cache=tmp_path / "c")
    assert count(corpus.train) > 3_000_000
    assert 0.01 < count(corpus.validation) / count(corpus.train) < 0.06
    assert 4 < corpus.unigram_bits_per_byte < 5.5


@given(
    sizes=st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 100), min_size=1, max_size=30),
    share=st.floats(0.01, 0.5),
)
def test_held_out_files_never_exceed_their_share(sizes: dict[str, int], share: float) -> None:
    chosen = validation_files(sizes, share=share)
    held_out, wanted = sum(sizes[name] for name in chosen), share * sum(sizes.values())
    assert held_out == 0 or wanted / 2 - 1e-9 <= held_out <= wanted + 1e-9
    assert chosen == validation_files(dict(reversed(sizes.items())), share=share)


def test_the_end_is_held_out_where_the_files_that_fit_are_too_little(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("ab")
    (tmp_path / "large.txt").write_text("text " * 2000)
    config = DataConfig(path=str(tmp_path), context=8, validation_share=0.05)
    corpus = prepare(config, cache=tmp_path / "c")
    assert count(corpus.validation) == 500


def test_batches_are_a_function_of_seed_and_step_however_they_are_asked_for() -> None:
    config = small_config(microbatches=4)
    corpus = prepare(config.data)
    device = torch.device("cpu")
    forwards = Batches(config, corpus, device=device)
    in_order = [forwards.tokens(number) for number in range(12)]
    backwards = Batches(config, corpus, device=device)
    for number in (11, 3, 7, 0, 5):
        assert torch.equal(backwards.tokens(number), in_order[number])
        assert torch.equal(backwards.targets(number)[:, :-1], in_order[number][:, 1:])
    assert len({tokens.numpy().tobytes() for tokens in in_order}) == 12
    other = Batches(small_config(microbatches=4, seed=1), corpus, device=device)
    assert not torch.equal(other.tokens(0), in_order[0])


def test_batches_of_all_data_parallel_ranks_differ_and_come_from_the_text() -> None:
    config = small_config()
    corpus = prepare(config.data)
    train = text_of(corpus, "train").encode()
    seen = []
    for rank in range(3):
        data = Batches(config, corpus, device=torch.device("cpu"), data_rank=rank, data_ranks=3)
        for row in data.tokens(0).numpy().astype(np.uint8):
            assert row.tobytes() in train
            seen.append(row.tobytes())
    assert len(set(seen)) == len(seen)


def test_validation_batches_are_spread_over_the_text_and_the_same_every_time() -> None:
    config = small_config()
    corpus = prepare(config.data)
    data = Batches(config, corpus, device=torch.device("cpu"))
    (first, _), (last, targets) = data.validation(0, count=2), data.validation(1, count=2)
    whole = text_of(corpus, "validation").encode()
    assert whole.startswith(first[0].numpy().astype(np.uint8).tobytes())
    assert whole.endswith(targets[-1].numpy().astype(np.uint8).tobytes())
    assert torch.equal(data.validation(1, count=2)[0], last)
