"""A model of the user's own trains as the decoder does; what does not fit is refused with what would."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files import ROOT
from support.small_runs import Rows, in_processes, replayed, small_config

from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.model.custom import FactoryError, make_stage
from stages.shape.partition import cut_model
from stages.trainer import replay, train
from stages.validation import ConfigError, check

DOCS = ROOT / "docs" / "models.md"
EXAMPLE, _ = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)

BAD = """
from torch import nn, ones
from my_models import *

class Buffered(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(ones(config.width))
        self.register_buffer("table", ones(config.width) * 3)
    def forward(self, x):
        return x * self.scale * self.table

def buffered(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, [*blocks[:-1], Buffered(config)], head

class Dropping(Buffered):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)

def dropping(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, [*blocks[:-1], Dropping(config)], head

def few(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, blocks[1:], head

def tied(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    head[1].weight = embedding.tokens.weight
    return embedding, blocks, head

def wide(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, [*blocks[:-1], nn.Linear(config.width, 2 * config.width)], head

class Doubled(Buffered):
    def forward(self, x):
        return super().forward(x).double()

class Transposed(Buffered):
    def forward(self, x):
        return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)

class Shorter(Buffered):
    def forward(self, x):
        return super().forward(x)[:, 1:]

def third_block(config, context, kind):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, [*blocks[:2], kind(config), *blocks[3:]], head

def doubled(config, context):
    return third_block(config, context, Doubled)

def transposed(config, context):
    return third_block(config, context, Transposed)

def shorter(config, context):
    return third_block(config, context, Shorter)

def list_of(config, context):
    return list(gpt2_like(config, context))

def no_module(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, blocks, lambda x: x
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of the documented example, which other processes can import as well."""
    (tmp_path / "my_models.py").write_text(EXAMPLE)
    (tmp_path / "bad_models.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = small_config("2bw", microbatches=2, steps=5)
    config.model.factory = "my_models:gpt2_like"
    return config


def with_factory(config: RunConfig, factory: str) -> RunConfig:
    return replace(config, model=replace(config.model, factory=factory))


def trained(process: Process, config: RunConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Weights as arrays: a tensor's memory is its process's, which may be gone before the other end looks."""
    rows = Rows()
    weights = train(config, process=process, recorder=rows).weights
    return {name: tensor.numpy() for name, tensor in weights.items()}, rows.rows


@pytest.mark.slow
def test_the_documented_model_trains_in_replay_and_distributed_to_the_same_bits(own: RunConfig) -> None:
    check(own)
    rows = Rows()
    alone = replay(own, recorder=rows)
    losses = [row["train_loss"] for row in rows.of_kind("step")]
    assert losses[-1] < losses[0] - 0.05
    assert {row["delay_max"][0] for row in rows.of_kind("segment")} == {1}
    together: dict[str, Any] = {}
    for [(weights, _)] in in_processes(trained, [own], size=2):
        together |= weights
    assert together.keys() == alone.weights.keys()
    assert all(
        torch.equal(torch.from_numpy(together[name]), tensor) for name, tensor in alone.weights.items()
    )


def test_names_and_first_weights_do_not_depend_on_the_cut(own: RunConfig) -> None:
    # Untrained: the first loss tells the initial weights, the names are those of what is saved.
    by_stages = {}
    for stages in (1, 2, 4):
        rows = Rows()
        config = replace(own, schedule=replace(own.schedule, name="gpipe"))
        config.parallel = replace(own.parallel, stages=stages)
        config.train = replace(own.train, steps=1)
        result = replay(config, recorder=rows)
        by_stages[stages] = (sorted(result.weights), result.train_losses)
    assert by_stages[1] == by_stages[2] == by_stages[4]
    names = by_stages[1][0]
    assert {"embedding.positions.weight", "blocks.3.up.bias", "head.1.weight"} <= set(names)


@pytest.mark.parametrize("schedule", ["paci", "zero-bubble"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_it_goes_with_other_schedules_and_with_recomputation(
    schedule: str, recompute: str, own: RunConfig
) -> None:
    own.schedule.name = schedule
    own.train = replace(own.train, recompute=recompute, clip="stage" if schedule == "paci" else "global")
    check(own)
    losses = replay(own, recorder=Rows()).train_losses
    assert losses[-1] < losses[0]


def test_buffers_have_the_values_that_the_function_computes(own: RunConfig) -> None:
    config = with_factory(own, "bad_models:buffered").model
    [_, last] = cut_model(config, stages=2, context=12)
    with torch.device("meta"):
        stage = make_stage(config, last, context=12)
    stage.prepare(device=torch.device("cpu"), dtype=torch.bfloat16)
    [(name, buffer)] = stage.named_buffers()
    assert name == "blocks.3.table"
    assert torch.equal(buffer, torch.full((16,), 3.0, dtype=torch.bfloat16))
    assert replay(with_factory(own, "bad_models:buffered"), recorder=Rows()).train_losses


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("bad_models:few", "returns 3 blocks, and model.layers is 4"),
        ("bad_models:tied", "head.1.weight is another parameter, too"),
        ("bad_models:wide", r"block 3 returns \[3, 12, 32\], must be a tensor \(batch, context, 16\)"),
        ("bad_models:doubled", r"block 2, the last .* of torch.float64, must be .* torch.float32"),
        ("bad_models:shorter", r"block 2, the last of its stage, hands on \[3, 11, 16\]"),
        ("bad_models:list_of", r"must return \(embedding, blocks, head\), not list"),
        ("bad_models:no_module", "head is function, must be a torch.nn.Module"),
        ("bad_models:missing", "cannot be imported"),
        ("bad_model:wrong_count", "no module 'bad_model'; did you mean bad_models"),
    ],
)
def test_the_model_of_a_factory_is_checked(factory: str, says: str, own: RunConfig) -> None:
    with pytest.raises(FactoryError, match=says):
        replay(with_factory(own, factory), recorder=Rows())


@pytest.mark.slow
def test_noncontiguous_tensors_are_sent_and_replayed_alike(own: RunConfig) -> None:
    config = with_factory(own, "bad_models:transposed")
    alone = replay(config, recorder=Rows())
    for [(weights, _)] in in_processes(trained, [config], size=2):
        assert all(
            torch.equal(torch.from_numpy(tensor), alone.weights[name]) for name, tensor in weights.items()
        )


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"factory": "my_models.gpt2_like"}, "model.factory", "accepted: package.module:function"),
        ({"factory": "mine.make('x'):y"}, "model.factory", "accepted: package.module:function"),
        ({"factory": "no_such_package.module:make"}, "model.factory", "no module no_such_package.module"),
        ({"family": "qwen3"}, "model.family", "does not go with model.factory; accepted with it: llama"),
        ({"init": "weights"}, "model.init", "not with model.factory"),
    ],
)
def test_a_factory_that_cannot_be_is_refused_by_key(
    changes: dict[str, Any], key: str, says: str, own: RunConfig
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check(replace(own, model=replace(own.model, **changes)))
    assert caught.value.key == key


def test_a_factorys_blocks_are_not_recomputed_selectively(own: RunConfig) -> None:
    own.train.recompute = "selective"
    with pytest.raises(ConfigError, match=r"not known what is cheap; accepted with it: none, full") as caught:
        check(own)
    assert caught.value.key == "train.recompute"


def test_recomputation_draws_again_what_the_forward_drew(own: RunConfig) -> None:
    own.model.factory = "bad_models:dropping"
    ends = []
    for recompute in ("none", "full"):
        own.train.recompute = recompute
        torch.manual_seed(1)
        rows = replayed(own)
        ends.append(rows.digest)
    assert ends[0] == ends[1]
