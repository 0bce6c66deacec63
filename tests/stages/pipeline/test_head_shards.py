"""Training with the head in shards, against one process that has the whole model."""

from __future__ import annotations

from typing import Any

import pytest
from support.single_process import check_close, delayed_training, joined
from support.small_runs import Rows, replayed, small_config
from torch import Tensor

from stages.config.run_config import RunConfig, changed
from stages.model.head_shard import HeadShard, ShardPass
from stages.shape.head import shard_rows
from stages.trainer import replay


def sharded(schedule: str, **options: Any) -> RunConfig:
    """A run with the head in shards; a vocabulary of 259 is divided by none of 2, 3 and 4."""
    return small_config(schedule, **{"microbatches": 4, "shard_head": True, "vocab_size": 259} | options)


def test_the_loss_is_that_of_the_whole_head_to_rounding() -> None:
    """Sums over the vocabulary are in float32 in both, in another order: some thousand roundings of 6e-8 of
    terms that are all positive differ by far less than 1e-6."""
    for precision, close in (("float32", 1e-6), ("bfloat16", 5e-3)):
        config = sharded("1f1b", vocab_size=4001, precision=precision, steps=2, eval_interval=1)
        with_shards = replay(config, recorder=Rows())
        config = changed(config, {"parallel.shard_head": False})
        whole = replay(config, recorder=Rows())
        assert with_shards.train_losses[0] == pytest.approx(whole.train_losses[0], rel=close / 5)
        assert with_shards.train_losses == pytest.approx(whole.train_losses, rel=close)
        assert with_shards.val_losses == pytest.approx(whole.val_losses, rel=close)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    config = sharded("2bw", steps=5, precision="float64")
    spoil = HeadShard.gradient_factors

    def spoiled(self: HeadShard, kept: ShardPass, sums: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        factors, hidden = spoil(self, kept, sums, scale=scale)
        calls.append(None)
        # One micro-batch of step 2, on one of two ranks.
        return (factors * float("nan") if len(calls) == 18 else factors), hidden

    calls: list[None] = []
    monkeypatch.setattr(HeadShard, "gradient_factors", spoiled)
    rows = replayed(config)
    assert [row["skipped"] for row in rows.of_kind("step")] == [False, False, True, False, False]
    weights, _, _ = delayed_training(config, delay=1, skipped=frozenset({2}))
    check_close(joined(rows.result.weights), weights)


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
