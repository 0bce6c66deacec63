from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.small_runs import replayed, small_config
from support.texts import write_nanogpt
from torch.nn import functional as F

from stages.config.run_config import EVAL_TOKENS, OWN_SPLIT, RunConfig, changed, eval_microbatches
from stages.data.dataset import DataError, find_validation_set, prepare
from stages.model.custom import make_stage
from stages.shape.partition import cut_model


def write_sets(folder: Path) -> dict[str, str]:
    sets = {}
    for name, length in (("wiki", 700), ("code", 2000)):
        file = folder / f"{name}.txt"
        file.write_text("".join(random.Random(name).choices("stages of a pipe", k=length)))
        sets[name] = str(file)
    return sets


SETTINGS: dict[str, Any] = {"schedule": "2bw", "layers": 2, "steps": 3, "precision": "float64"}


def with_sets(folder: Path, *, data: int = 1) -> RunConfig:
    config = small_config(data=data, **SETTINGS)
    return changed(config, {"data.validation": write_sets(folder)})


def loss_by_hand(config: RunConfig, weights: dict[str, torch.Tensor], path: str) -> float:
    """Mean cross-entropy of as many windows as fit, from the logits of the whole model."""
    [cut] = cut_model(config.model, stages=1, context=config.data.context)
    module = make_stage(config.model, cut, context=config.data.context)
    module.prepare(device=torch.device("cpu"), dtype=torch.float64)
    module.double().load_state_dict(weights)
    text = torch.tensor(list(Path(path).read_bytes()))
    context, size = config.data.context, config.train.microbatch_size
    sequences = (len(text) - 1) // context // size * size
    starts = np.linspace(0, len(text) - context - 1, sequences, dtype=np.int64)
    losses = []
    with torch.no_grad():
        for start in starts:
            tokens = text[start : start + context]
            logits = module(tokens[None], None)[0]
            losses.append(float(F.cross_entropy(logits.double(), text[start + 1 : start + context + 1])))
    return float(np.mean(losses))


def test_each_set_has_the_loss_of_the_whole_model_on_its_text(tmp_path: Path) -> None:
    config = with_sets(tmp_path)
    rows = replayed(config)
    result = rows.result
    last = rows.of_kind("eval")[-1]
    assert list(last["sets"]) == [OWN_SPLIT, "wiki", "code"]
    for name, path in config.data.validation.items():
        # float64; sums in another order.
        assert last["sets"][name]["val_loss"] == pytest.approx(
            loss_by_hand(config, result.weights, path), rel=1e-10
        )
    assert last["sets"][OWN_SPLIT]["val_loss"] == last["val_loss"]
    described = rows.of_kind("start")[0]["validation"]
    assert described["wiki"]["tokens"] == 700
    context, size = config.data.context, config.train.microbatch_size
    assert described["wiki"]["evaluated_tokens"] == 699 // context // size * size * context


def test_further_sets_change_no_other_number(tmp_path: Path) -> None:
    config = with_sets(tmp_path)
    alone, beside = (replayed(given) for given in (small_config(**SETTINGS), config))
    assert alone.result.train_losses == beside.result.train_losses
    assert alone.digest == beside.digest
    for row, other in zip(alone.of_kind("eval"), beside.of_kind("eval"), strict=True):
        assert (row["val_loss"], row["val_loss_error"]) == (other["val_loss"], other["val_loss_error"])
        assert "sets" not in row
    config = changed(config, {"data.headline": "code"})
    headed = replayed(config)
    assert headed.result.val_losses == [row["sets"]["code"]["val_loss"] for row in beside.of_kind("eval")]
    [start] = headed.of_kind("start")
    assert start["unigram_bits_per_byte"] == start["validation"]["code"]["unigram_bits_per_byte"]


def test_losses_do_not_depend_on_how_many_data_ranks_share_the_sets(tmp_path: Path) -> None:
    """At equal weights: those of the start, which a learning rate near 0 leaves."""
    measured = []
    for data in (1, 2, 3):
        config = with_sets(tmp_path, data=data)
        config = changed(config, {"optimizer.lr": 1e-300})
        rows = replayed(config)
        measured.append([row["sets"] for row in rows.of_kind("eval")])
    assert measured[0] == measured[1] == measured[2]


@given(
    wanted=st.integers(1, 5000) | st.none(),
    tokens=st.integers(65, 20_000),
    size=st.integers(1, 5),
    context=st.integers(1, 64),
)
def test_an_evaluation_reads_enough_without_overlap(
    wanted: int | None, tokens: int, size: int, context: int
) -> None:
    config = RunConfig()
    config = changed(
        config,
        {
            "data": replace(config.data, context=context),
            "train.microbatch_size": size,
            "train.eval_tokens": wanted,
        },
    )
    for name in ("wiki", OWN_SPLIT):
        sequences = size * eval_microbatches(config, name, tokens=tokens)
        starts = np.linspace(0, tokens - context - 1, sequences, dtype=np.int64)
        overlaps = bool((np.diff(starts) < context).any())
        # A set that is shorter than one micro-batch is read with overlap.
        assert not overlaps or sequences == size
        enough = wanted or EVAL_TOKENS
        if wanted is None and name == OWN_SPLIT:
            enough = config.train.eval_microbatches * size * context
            assert sequences * context <= enough
        if sequences * context < enough:
            assert (sequences + size) * context > tokens - 1, "one micro-batch more would overlap"


def test_a_set_of_shards_is_those_held_out_by_name_or_all(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    write_nanogpt(folder / "fineweb_val_0.bin", range(300))
    whole = find_validation_set(str(folder), cache=tmp_path / "c")
    write_nanogpt(folder / "fineweb_train_0.bin", range(500))
    held_out = find_validation_set(str(folder), cache=tmp_path / "c")
    assert held_out == whole
    assert [shard.tokens for shard in held_out.shards] == [300]
    named = find_validation_set(str(folder / "fineweb_train_0.bin"), cache=tmp_path / "c")
    assert [shard.tokens for shard in named.shards] == [500]


def test_a_set_with_another_hash_is_refused(tmp_path: Path) -> None:
    config = with_sets(tmp_path)
    known = prepare(config.data).sets["wiki"].sha256
    config = changed(config, {"data.validation_sha256": {"wiki": known}})
    prepare(config.data)
    Path(config.data.validation["wiki"]).write_text("other words " * 99)
    with pytest.raises(DataError, match="holds other data than the run was made for") as refused:
        prepare(config.data)
    assert refused.value.key == "data.validation.wiki"
