from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf
from support.small_runs import small_config

from stages.pipeline.build import segment_lengths
from stages.validation import ConfigError, check


@pytest.mark.parametrize(
    ("changed", "key", "says"),
    [
        ({"schedule.name": "2wb"}, "schedule.name", "accepted: gpipe, 1f1b"),
        ({"optimizer.name": "adam"}, "optimizer.name", "accepted: .*adamw"),
        ({"parallel.stages": 5}, "parallel.stages", "5 stages are asked for; .* 4 blocks"),
        ({"parallel.data": 0}, "parallel.data", "must be at least 1"),
        ({"train.max_skipped": -1}, "train.max_skipped", "must be at least 0"),
        ({"schedule.microbatches": 0}, "schedule.microbatches", "must be at least 1"),
        (
            {"schedule.name": "2bw", "parallel.stages": 4, "schedule.microbatches": 2},
            "schedule.microbatches",
            "2bw with 4 stages needs at least 3 micro-batches per step .* the smallest delay is 2",
        ),
        ({"error_feedback.coefficient": 1.0}, "error_feedback", "1f1b has none"),
        ({"schedule.name": "paci"}, "train.clip", "accepted with it: stage, none"),
        ({"train.clip": "glob"}, "train.clip", "accepted: global, stage, none"),
        ({"optimizer.momentum": 0.9}, "optimizer", "momentum"),
        ({"model.heads": 3}, "model.heads", "must divide model.width = 16"),
        ({"model.head_dim": 5}, "model.head_dim", "must be even for rotary positions"),
        ({"model.head_dim": 0}, "model.head_dim", "must be at least 1"),
        ({"model.family": "lama"}, "model.family", "accepted: llama, qwen3"),
        ({"model.kv_heads": 3}, "model.kv_heads", "must divide model.heads = 4"),
        ({"model.vocab_size": 100}, "model.vocab_size", "needs 256"),
        ({"data.path": "/nowhere/at/all"}, "data.path", "does not exist"),
        (
            {"data.document_mask": True},
            "data.document_mask",
            "text.txt does not record which token ends a docu",
        ),
        (
            {"data.end_of_document": 10},
            "data.end_of_document",
            "goes with data.document_mask: true; accepted without it: null",
        ),
        (
            {"data.document_mask": True, "data.end_of_document": 256},
            "data.end_of_document",
            "is 256, must be below model.vocab_size = 256",
        ),
        ({"data.document_mask": True, "data.end_of_document": -1}, "data.end_of_document", "at least 0"),
        (
            {"data.document_mask": True, "model.factory": "support.two_weights:make"},
            "data.document_mask",
            "the blocks of model.factory take no mask; accepted with it: false",
        ),
        ({"optimizer.lr": float("nan")}, "optimizer.lr", "must be above 0"),
        ({"optimizer.warmup": 1.5}, "optimizer.warmup", "must be at most 1"),
    ],
)
def test_invalid_settings_are_refused_by_key(changed: dict[str, Any], key: str, says: str) -> None:
    config = OmegaConf.structured(small_config())
    check(OmegaConf.to_object(config))
    for name, value in changed.items():
        OmegaConf.update(config, name, value)
    with pytest.raises(ConfigError, match=says) as caught:
        check(OmegaConf.to_object(config))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("steps", "eval_interval"), [(10, 3), (9, 3), (2, 5), (10**7, 10**7), (10**6, 7 * 10**5)]
)
def test_segments_cover_the_run_and_end_at_every_evaluation(steps: int, eval_interval: int) -> None:
    lengths = segment_lengths(small_config(steps=steps, eval_interval=eval_interval))
    ends = [first + count for first, count in lengths]
    assert [first for first, _ in lengths] == [0, *ends[:-1]]
    assert ends[-1] == steps
    assert set(range(eval_interval, steps + 1, eval_interval)) <= set(ends)
    assert max(count for _, count in lengths) <= 125_000
