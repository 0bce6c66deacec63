"""Runs whose attention stays within documents, against training on each document alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.single_process import batches, check_first_gradient, whole_model
from support.small_runs import replayed, small_config
from support.training_cases import within_blocks
from torch import Tensor

from schedules import FAMILY
from stages.config.run_config import RunConfig, changed, eval_microbatches
from stages.data.dataset import prepare
from stages.data.shards import Tokens

END = ord(" ")


def config_of(schedule: str, **changed: Any) -> RunConfig:
    facts = FAMILY[schedule]
    microbatches = 4 if schedule == "dualpipe-v" else 2
    settings: dict[str, Any] = {
        "microbatches": microbatches,
        "update_interval": microbatches if "update_interval" in facts.options else None,
        "split": "split" in facts.options,
    }
    return small_config(schedule, precision="float64", documents=True, **settings | changed)


def alone(config: RunConfig, windows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of the mean over the targets in `windows` `(sequences, context + 1)`, with every
    document of a sequence trained on alone, from position 0."""
    module = whole_model(config, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    documents = 0
    for window in windows:
        start = 0
        for end in range(1, len(window)):
            if window[end - 1] == END or end == len(window) - 1:
                document = window[None, start : end + 1]
                logits = module(document[:, :-1])
                total = total + F.cross_entropy(logits[0], document[0, 1:], reduction="sum")
                start, documents = end, documents + 1
    assert documents > 2 * len(windows)
    loss = total / windows[:, 1:].numel()
    named = dict(module.named_parameters())
    return loss.detach(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def windows_of(config: RunConfig, *, steps: int) -> Tensor:
    """All sequences of the first steps, over all data ranks."""
    microbatches = config.schedule.microbatches * config.parallel.data
    data = batches(replace(config, schedule=replace(config.schedule, microbatches=microbatches)))
    pairs = [(data.tokens(number), data.targets(number)) for number in range(steps * microbatches)]
    return torch.cat([torch.cat((tokens, targets[:, -1:]), dim=1) for tokens, targets in pairs])


CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((schedule, "llama", {}) for schedule in FAMILY),
    ("1f1b", "llama", {"recompute": "full"}),
    ("zero-bubble", "qwen3", {"recompute": "selective"}),
    ("zero-bubble", "experts", {"recompute": "full"}),
    ("2bw", "experts", {"recompute": "selective"}),
    ("2bw", "llama", {"stages": 3, "cut": within_blocks(layers=4, stages=3)}),
    ("zero-bubble", "experts", {"stages": 3, "cut": within_blocks(layers=4, stages=3)}),
    ("1f1b", "llama", {"stages": 3, "cut": [2, 2, 0]}),
    ("2bw-v", "tied", {}),
    ("1f1b", "tied", {"stages": 1}),
    ("zero-bubble", "mup", {}),
    ("2bw", "mup", {"shard_head": True, "microbatches": 4}),
    ("2bw", "llama", {"data": 2}),
    ("2bw-v", "tied", {"data": 2}),
    ("1f1b", "mup", {"data": 2}),
]


@pytest.mark.parametrize(("schedule", "family", "changed"), CASES)
def test_the_gradient_is_that_of_each_document_alone(
    schedule: str, family: str, changed: dict[str, Any]
) -> None:
    """Of the first step, at the initial weights, under whatever delay."""
    config = config_of(schedule, family=family, **changed)
    _, expected = alone(config, windows_of(config, steps=1))
    check_first_gradient(config, expected)


@pytest.mark.parametrize(
    ("schedule", "family", "data"),
    [("1f1b", "llama", 1), ("2bw", "llama", 2), ("2bw-v", "tied", 2), ("2bw", "mup", 1)],
)
@pytest.mark.slow
def test_losses_in_training_and_validation_are_those_of_each_document_alone(
    schedule: str, family: str, data: int, tmp_path: Path
) -> None:
    """Also of a further validation set, whose documents are shorter."""
    config = config_of(schedule, family=family, data=data, steps=1, lr=1e-12)
    (tmp_path / "set.txt").write_text("it is of no use to be at an end so we go on " * 4)
    config = changed(config, {"data.validation": {"short": str(tmp_path / "set.txt")}})
    rows = replayed(config)
    result = rows.result
    loss, _ = alone(config, windows_of(config, steps=1))
    assert result.train_losses == pytest.approx([float(loss)], rel=1e-10)
    corpus = prepare(config.data)
    [row] = rows.of_kind("eval")
    for name in ("data", "short"):
        split = Tokens(corpus.held_out(name).shards)
        count = eval_microbatches(config, name, tokens=len(split))
        starts = np.linspace(
            0, len(split) - config.data.context - 1, count * config.train.microbatch_size, dtype=np.int64
        )
        held_out = torch.from_numpy(split.rows(starts, length=config.data.context + 1))
        # The step has moved the weights by its learning rate of 1e-12.
        assert row["sets"][name]["val_loss"] == pytest.approx(float(alone(config, held_out)[0]), rel=1e-10)
    assert result.val_losses == [row["sets"]["data"]["val_loss"]]


def test_positions_begin_at_zero_in_each_document() -> None:
    """Attention depends on differences of rotary positions alone, so no loss shows where they begin."""
    config = config_of("1f1b")
    documents = batches(config).documents(0)
    assert documents is not None
    module = whole_model(config, dtype=torch.float64)
    assert module.rotation is not None
    rotation, _ = module.place(documents)
    tokens = batches(config).tokens(0)
    for sequence, row in enumerate(tokens.tolist()):
        position = 0
        for place, token in enumerate(row):
            assert torch.equal(rotation[:, sequence, 0, place], module.rotation[:, position])
            position = 0 if token == END else position + 1
