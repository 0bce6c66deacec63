"""`data.sources`: each sequence is of one source, drawn by its weight from the seed and the step alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.resumed import replay_twice, saving
from support.small_runs import replayed, small_config, with_documents
from support.texts import write_nanogpt

from stages.config.run_config import RunConfig, changed
from stages.data.batches import Batches
from stages.data.dataset import DataError, find_corpus, prepare
from stages.data.documents import attention_share

ALPHABETS = {"code": "xyz{}\n", "prose": "abcdefgh ", "wiki": "ABCDEFGH "}


def mixed(folder: Path, **options: object) -> RunConfig:
    """A run on three texts without a common byte but the space, with weights 1, 2 and 5."""
    config = small_config("2bw", text=folder / "none", layers=2, **options)  # type: ignore[arg-type]
    sources = {}
    for name, alphabet in reversed(ALPHABETS.items()):
        file = folder / f"{name}.txt"
        file.write_text("".join(random.Random(name).choices(alphabet, k=700 + 100 * len(alphabet))))
        sources[name] = str(file)
    weights = {"prose": 2.0, "wiki": 5.0}
    return changed(config, {"data.path": None, "data.sources": sources, "data.weights": weights})


def sequences(config: RunConfig, *, steps: int, data_ranks: int = 1) -> torch.Tensor:
    """All windows of a run's first steps, in the order of data ranks in a step."""
    corpus, windows = prepare(config.data), []
    for step in range(steps):
        for rank in range(data_ranks):
            batches = Batches(
                config, corpus, device=torch.device("cpu"), data_rank=rank, data_ranks=data_ranks
            )
            first = step * config.schedule.microbatches
            for microbatch in range(first, first + config.schedule.microbatches):
                windows.append(
                    torch.cat([batches.tokens(microbatch), batches.targets(microbatch)[:, -1:]], dim=1)
                )
    return torch.cat(windows)


def test_a_sequence_is_of_one_source_by_its_weight(tmp_path: Path) -> None:
    config = mixed(tmp_path, microbatches=100)
    counts = dict.fromkeys(ALPHABETS, 0)
    for window in sequences(config, steps=10):
        [source] = [
            name
            for name, alphabet in ALPHABETS.items()
            if set(bytes(window.tolist()).decode()) <= {*alphabet}
        ]
        assert bytes(window.tolist()) in Path(config.data.sources[source]).read_bytes()
        counts[source] += 1
    for name, weight in (("code", 1), ("prose", 2), ("wiki", 5)):
        share, count = weight / 8, sum(counts.values())
        # Four standard deviations; the seed is fixed.
        assert abs(counts[name] / count - share) < 4 * (share * (1 - share) / count) ** 0.5


def test_sequences_follow_from_seed_and_step_alone(tmp_path: Path) -> None:
    config = mixed(tmp_path, microbatches=4)
    whole = sequences(config, steps=3)
    two_ranks = replace(config, schedule=replace(config.schedule, microbatches=2))
    assert torch.equal(sequences(two_ranks, steps=3, data_ranks=2), whole)
    in_other_units = replace(
        config,
        data=replace(
            config.data,
            sources=dict(sorted(config.data.sources.items())),
            weights={"wiki": 10.0, "prose": 4.0, "code": 2.0},
        ),
    )
    assert torch.equal(sequences(in_other_units, steps=3), whole)
    assert not torch.equal(sequences(replace(config, seed=1), steps=3), whole)
    batches = Batches(config, prepare(config.data), device=torch.device("cpu"))
    size = config.train.microbatch_size
    for microbatch in (11, 0, 5):
        assert torch.equal(batches.tokens(microbatch), whole[microbatch * size :][:size, :-1])


def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    replay_twice(saving(mixed(tmp_path, data=2)), tmp_path / "c", step=2)


def test_the_own_split_is_that_of_all_sources(tmp_path: Path) -> None:
    config = mixed(tmp_path, steps=1)
    rows = replayed(config)
    [start] = rows.of_kind("start")
    corpus = find_corpus(config.data)
    alone = [
        find_corpus(replace(config.data, path=config.data.sources[name], sources={})) for name in ALPHABETS
    ]
    assert start["sources"] == {
        name: {"share": weight / 8, "tokens": each.train[0].tokens}
        for (name, weight), each in zip({"code": 1, "prose": 2, "wiki": 5}.items(), alone, strict=True)
    }
    assert corpus.validation == tuple(shard for each in alone for shard in each.validation)
    assert (start["bytes_per_token"], start["unigram_bits_per_byte"]) == (1.0, None)
    assert start["corpus_sha256"] == corpus.sha256


def test_the_hash_is_of_the_content_and_the_names(tmp_path: Path) -> None:
    data = mixed(tmp_path).data
    known = find_corpus(data).sha256
    copy = tmp_path / "copy.txt"
    copy.write_bytes(Path(data.sources["wiki"]).read_bytes())
    assert find_corpus(replace(data, sources={**data.sources, "wiki": str(copy)})).sha256 == known
    assert find_corpus(replace(data, weights={})).sha256 == known
    others = dict(data.sources)
    others["pages"] = others.pop("wiki")
    assert find_corpus(replace(data, sources=others)).sha256 != known
    copy.write_text("ABC " * 300)
    changed = replace(data, sources={**data.sources, "wiki": str(copy)}, sha256=known)
    with pytest.raises(DataError, match="holds other data than the run was made for"):
        prepare(changed)


def test_the_share_of_attention_is_weighted(tmp_path: Path) -> None:
    config = with_documents(mixed(tmp_path))
    context = config.data.context
    shares = {
        name: attention_share(find_corpus(replace(config.data, path=path, sources={})), context=context)
        for name, path in config.data.sources.items()
    }
    assert shares["code"] == 1.0  # has no space
    expected = (1.0 + 2 * (shares["prose"] or 0) + 5 * (shares["wiki"] or 0)) / 8
    assert attention_share(find_corpus(config.data), context=context) == pytest.approx(expected, rel=1e-12)


def test_what_is_wrong_is_said_of_the_source(tmp_path: Path) -> None:
    data = mixed(tmp_path).data
    (tmp_path / "code.txt").write_text("too short")
    with pytest.raises(DataError, match=r"code\.txt has [0-9]+ tokens, one sequence needs 13") as caught:
        prepare(data)
    assert caught.value.key == "data.sources.code"
    write_nanogpt(tmp_path / "train.bin", np.arange(400) % 300)
    with pytest.raises(DataError) as caught:
        find_corpus(replace(data, sources={**data.sources, "code": str(tmp_path / "nowhere")}))
    assert caught.value.key == "data.sources.code"
    of_both = find_corpus(
        replace(data, sources={"a": data.sources["wiki"], "b": str(tmp_path / "train.bin")})
    )
    assert of_both.bytes_per_token is None
