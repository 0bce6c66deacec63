"""Training with the head in shards, against one process that has the whole model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed import go_back, replay_twice, saving
from support.single_process import (
    batches,
    check_against_one_process,
    check_close,
    check_first_gradient,
    delayed_training,
    joined,
    step_gradient,
    whole_model,
)
from support.small_runs import Rows, small_config, with_experts, with_mup
from support.training_cases import check_processes_are_replays
from torch import Tensor

from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.saved_weights import newest_weights
from stages.config.run_config import RunConfig
from stages.model.head_shard import HeadShard, ShardPass
from stages.shape.families import describe
from stages.shape.head_rows import shard_rows
from stages.trainer import replay
from stages.validation import ConfigError, check

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {},
    "zero-bubble": {},
    "zb-v": {},
    "v-half": {},
    "interleaved-1f1b": {"chunks": 2},
    "2bw": {},
    "2bw-v": {"split": True},
}


def sharded(schedule: str, *, family: str = "llama", vocab_size: int = 259, **options: Any) -> RunConfig:
    """A run with the head in shards; a vocabulary of 259 is divided by none of 2, 3 and 4."""
    config = small_config(schedule, layers=8, shard_head=True, **SCHEDULES[schedule], **options)
    config.model.vocab_size = vocab_size
    if family == "experts":
        return with_experts(config, shared_experts=1, dense_layers=1)
    if family == "mup":
        return with_mup(config)
    if family == "tied":
        config.model.tied = True
        return config
    config.model.family = family
    return config


@pytest.mark.parametrize(
    ("schedule", "stages", "family"),
    [
        *((schedule, 2, "llama") for schedule in SCHEDULES if not schedule.startswith("2bw")),
        ("1f1b", 1, "llama"),
        ("1f1b", 4, "qwen3"),
        ("1f1b", 3, "experts"),
        ("zb-v", 4, "experts"),
        ("v-half", 3, "qwen3"),
        ("1f1b", 3, "mup"),
        ("zb-v", 2, "mup"),
        *(
            (schedule, 2 + number % 2, "tied")
            for number, schedule in enumerate(SCHEDULES)
            if not schedule.startswith("2bw")
        ),
        ("1f1b", 1, "tied"),
    ],
)
def test_gradients_are_those_of_a_single_process(schedule: str, stages: int, family: str) -> None:
    config = sharded(schedule, family=family, stages=stages, microbatches=4, precision="float64")
    module = whole_model(config, dtype=torch.float64)
    expected, _ = step_gradient(module, batches(config), step=0, microbatches=4)
    check_first_gradient(config, expected)


@pytest.mark.parametrize(
    ("schedule", "stages", "optimizer", "coefficient", "family"),
    [
        ("1f1b", 3, "adamw", 0.0, "llama"),
        ("zb-v", 2, "muon", 0.0, "llama"),
        ("2bw", 3, "muon", 1.0, "llama"),
        ("2bw", 4, "lion", 0.0, "llama"),
        ("2bw-v", 3, "adamw", 0.0, "llama"),
        ("2bw", 3, "muon", 1.0, "mup"),
        ("1f1b", 2, "adamw", 0.0, "mup"),
        ("1f1b", 3, "muon", 0.0, "tied"),
        ("zb-v", 2, "adamw", 0.0, "tied"),
        ("2bw", 2, "muon", 1.0, "tied"),
        ("2bw", 4, "adamw", 0.0, "tied"),
        ("2bw-v", 3, "adamw", 0.0, "tied"),
    ],
)
def test_a_run_is_the_recurrence_written_out_on_one_process(
    schedule: str, stages: int, optimizer: str, coefficient: float, family: str
) -> None:
    config = sharded(
        schedule,
        family=family,
        stages=stages,
        microbatches=6,
        optimizer=optimizer,
        coefficient=coefficient,
        steps=7,
        precision="float64",
        clip_norm=0.5,
    )
    check_against_one_process(config, delay=1 if schedule.startswith("2bw") else 0)


@pytest.mark.slow
def test_processes_and_replay_agree_bit_for_bit() -> None:
    configs = [
        sharded(schedule, stages=2, microbatches=4, **options)
        for schedule in SCHEDULES
        for options in ({"precision": "bfloat16", "vocab_size": 301}, {"family": "tied"})
    ]
    check_processes_are_replays(configs, size=2)


def test_the_loss_is_that_of_the_whole_head_to_rounding() -> None:
    """Sums over the vocabulary are in float32 in both, in another order: some thousand roundings of 6e-8 of
    terms that are all positive differ by far less than 1e-6."""
    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "steps": 2, "eval_interval": 1}
    for precision, close in (("float32", 1e-6), ("bfloat16", 5e-3)):
        config = sharded("1f1b", vocab_size=4001, precision=precision, **options)
        with_shards = replay(config, recorder=Rows())
        config.parallel.shard_head = False
        whole = replay(config, recorder=Rows())
        assert with_shards.train_losses[0] == pytest.approx(whole.train_losses[0], rel=close / 5)
        assert with_shards.train_losses == pytest.approx(whole.train_losses, rel=close)
        assert with_shards.val_losses == pytest.approx(whole.val_losses, rel=close)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-v"])
def test_a_run_goes_on_to_the_same_bits_with_the_same_shards(schedule: str, tmp_path: Path) -> None:
    config = saving(sharded(schedule, stages=2, microbatches=4, optimizer="muon"))
    replay_twice(config, tmp_path, step=2)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((3, True), (2, True)), ((3, True), (2, False)), ((2, False), (3, True))],
    ids=["to fewer shards", "to a whole head", "from a whole head"],
)
@pytest.mark.parametrize(("schedule", "family"), [("2bw", "llama"), ("2bw-v", "tied")])
def test_a_run_goes_on_with_other_shards_and_with_none(
    schedule: str,
    family: str,
    saved: tuple[int, bool],
    resumed: tuple[int, bool],
    tmp_path: Path,
) -> None:
    """As the run that went on with what saved: losses differ by the order of sums alone, and what is exported
    from the checkpoint is the same."""

    def config(stages: int, shard_head: bool) -> RunConfig:
        run = sharded(
            schedule,
            family=family,
            stages=stages,
            microbatches=4,
            precision="float64",
            coefficient=1.0 if schedule == "2bw" else 0.0,
        )
        run.parallel.shard_head = shard_head
        return saving(run)

    first, second = config(*saved), config(*resumed)
    whole = replay(first, recorder=Rows(), checkpoints=tmp_path / "c")
    go_back(tmp_path / "c", 2)
    exported = []
    for run in (first, second):
        folder = tmp_path / f"export {len(exported)}"
        folder.mkdir()
        weights = newest_weights(tmp_path / "c", run)
        count = write_weights(weights, run, folder, format=ExportFormat.HF, weights=Weights.MASTER)
        assert count == describe(run.model).parameter_count
        exported.append((folder / "model.safetensors").read_bytes())
    assert exported[0] == exported[1]
    other = replay(second, recorder=Rows(), checkpoints=tmp_path / "c")
    assert other.train_losses == pytest.approx(whole.train_losses[2:], rel=1e-12)
    one, another = (
        joined(result.weights) if run.parallel.shard_head else result.weights
        for run, result in ((first, whole), (second, other))
    )
    assert one.keys() == another.keys()
    for name, weight in one.items():
        torch.testing.assert_close(another[name], weight, rtol=1e-10, atol=1e-12)


def test_initial_weights_are_those_of_the_whole_head() -> None:
    config = sharded("1f1b", stages=3, microbatches=4, steps=1, lr=1e-30)
    config.optimizer.weight_decay = 0.0
    trained = joined(replay(config, recorder=Rows()).weights)
    drawn = dict(whole_model(config, dtype=torch.float32).named_parameters())
    torch.testing.assert_close(trained["head.weight"], drawn["head.weight"], rtol=0, atol=1e-20)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    config = sharded("2bw", stages=2, microbatches=4, steps=5, precision="float64")
    spoil = HeadShard.gradient_factors

    def spoiled(self: HeadShard, kept: ShardPass, sums: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        factors, hidden = spoil(self, kept, sums, scale=scale)
        calls.append(None)
        # One micro-batch of step 2, on one of two ranks.
        return (factors * float("nan") if len(calls) == 18 else factors), hidden

    calls: list[None] = []
    monkeypatch.setattr(HeadShard, "gradient_factors", spoiled)
    rows = Rows()
    result = replay(config, recorder=rows)
    assert [row["skipped"] for row in rows.of_kind("step")] == [False, False, True, False, False]
    weights, _, _ = delayed_training(config, delay=1, skipped=frozenset({2}))
    check_close(joined(result.weights), weights)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"factory": "stages.model.custom:make_stage"},
            "parallel.shard_head: needs a head that the program knows",
        ),
        (
            {"z_loss": 1e-4},
            "parallel.shard_head: computes the plain cross-entropy, without model.logit_softcap",
        ),
        ({"vocab_size": 2}, "parallel.shard_head: gives each rank some of the 2 tokens"),
        (
            {"optimizer": "scion"},
            "parallel.shard_head: needs an optimizer that updates rows of the head alone",
        ),
        (
            {"clip": "stage"},
            "parallel.shard_head: makes stages of the head's shards, and train.clip is stage",
        ),
        ({"schedule": "pipedream"}, "stages update on their own, and shards of the head need"),
        ({"schedule": "looped-bfs"}, "shards of the head need backwards of the last stage in the order"),
        (
            {"microbatches": 2},
            "needs at least 3 micro-batches per step for schedule.delay = 1 and parallel.shard",
        ),
        (
            {"tied": True, "data": 2, "shard_gradients": True},
            "parallel.shard_gradients: keeps one whole gradient, and shards that embedding and head share",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(changed: dict[str, Any], problem: str) -> None:
    config = sharded("2bw", stages=3, microbatches=6)
    for key, value in changed.items():
        if key in ("factory", "vocab_size", "z_loss", "tied"):
            setattr(config.model, key, value)
        elif key in ("data", "shard_gradients"):
            setattr(config.parallel, key, value)
        elif key == "optimizer":
            config.optimizer.name = value
        elif key == "clip":
            config.train.clip = value
        elif key == "schedule":
            config.schedule.name = value
            config.train.clip = "none"
            config.schedule.chunks = 2 if value == "looped-bfs" else 1
        else:
            config.schedule.microbatches = value
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check(config)


@pytest.mark.parametrize(
    ("vocabulary", "others", "sizes"),
    [
        (259, (0, 0, 0, 0), [65, 65, 65, 64]),
        (3, (0, 9, 0), [1, 1, 1]),
        (131072, (7,) * 8, [16384] * 8),
        (50257, (0, 0, 0, 0), [12608, 12608, 12544, 12497]),
        # A rank that computes 40 rows' worth less gets 40 rows more, one that computes far more a single one.
        (259, (100, 60, 1000, 100), [73, 113, 1, 72]),
    ],
)
def test_shards_have_all_rows_once_and_even_out_the_ranks(
    vocabulary: int, others: tuple[int, ...], sizes: list[int]
) -> None:
    rows = shard_rows(vocabulary, row=1, others=others)
    assert list(map(len, rows)) == sizes
    assert [row for shard in rows for row in shard] == list(range(vocabulary))
