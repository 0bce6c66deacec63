"""`train.ema_decay`: the average of the weights is that of its formula, in every kind of run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.resumed import saving
from support.single_process import batches, whole_model
from support.small_runs import Rows, newest_version, replayed, small_config, spoil_gradients
from support.training_cases import measured
from torch import Tensor

from optimizers.corrections.base import PlainUpdate
from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.initial_weights import WEIGHTS_FILE
from stages.checkpoint.saved_weights import newest_weights
from stages.config.run_config import RunConfig, changed
from stages.model.head_loss import next_token_loss
from stages.trainer import replay
from stages.update.weight_average import AveragedWeights

DECAY = 0.8


def weights_of(folder: Path, config: RunConfig, *, step: int, which: Weights) -> dict[str, Tensor]:
    saved = newest_weights(folder, config, step=step)
    return saved.read(saved.names, which)


@torch.no_grad()
def validation_loss(config: RunConfig, weights: dict[str, Tensor]) -> float:
    module = whole_model(config, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name])
    data, losses = batches(config), []
    for index in range(config.train.eval_microbatches):
        tokens, targets = data.validation(index, count=config.train.eval_microbatches)
        losses.append(float(next_token_loss(module(tokens), targets)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("2bw", {"coefficient": 1.0, "optimizer": "muon"}),
        ("2bw", {"coefficient": 1.0, "form": "buffered", "data": 2}),
        ("2bw-v", {"stages": 1}),
        ("2bw", {"stages": 3, "layers": 3, "shard_head": True, "microbatches": 4}),
    ],
)
def test_the_average_is_that_of_its_formula(
    schedule: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the weights after each update; that of the third, which is skipped, has no share in it."""
    config = small_config(schedule, steps=6, eval_interval=6, precision="float64", ema_decay=DECAY, **options)
    spoil_gradients(monkeypatch, when=lambda weights: newest_version(weights) == 2, data_rank=0)
    rows = replayed(saving(config, interval=1), checkpoints=tmp_path)
    assert [row["skipped"] for row in rows.of_kind("step")] == [False, False, True, False, False, False]
    of_steps = [weights_of(tmp_path, config, step=step, which=Weights.MASTER) for step in (1, 2, 4, 5, 6)]
    factors = [DECAY**age for age in (4, 3, 2, 1, 0)]
    expected = {
        name: sum(f * weights[name] for f, weights in zip(factors, of_steps, strict=True)) / sum(factors)
        for name in of_steps[0]
    }
    average = weights_of(tmp_path, config, step=6, which=Weights.EMA)
    for name, tensor in expected.items():
        torch.testing.assert_close(average[name], tensor, rtol=1e-10, atol=1e-12)
    (tmp_path / "out").mkdir()
    saved = newest_weights(tmp_path, config)
    write_weights(saved, config, tmp_path / "out", format=ExportFormat.SAFETENSORS, weights=Weights.EMA)
    exported = load_file(tmp_path / "out" / WEIGHTS_FILE)
    assert exported.keys() == average.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in average.items())
    [evaluation] = rows.of_kind("eval")
    assert evaluation["val_loss"] == pytest.approx(validation_loss(config, of_steps[-1]), rel=1e-10)
    assert evaluation["val_loss_ema"] == pytest.approx(validation_loss(config, average), rel=1e-10)
    assert evaluation["val_loss_ema"] != pytest.approx(evaluation["val_loss"], rel=1e-6)


def test_it_changes_nothing_else() -> None:
    runs = []
    for decay in (None, DECAY):
        config = small_config("2bw", coefficient=1.0, ema_decay=decay)
        rows = replayed(config)
        runs.append([{**row, "memory": None} for row in measured(rows)])
    without, averaged = runs
    for row in averaged:
        assert ("val_loss_ema" in row) == (row["kind"] == "eval")
        row.pop("val_loss_ema", None)
    assert averaged == without


def test_every_validation_set_has_a_loss_of_the_average() -> None:
    config = small_config("2bw", precision="bfloat16", coefficient=1.0, ema_decay=DECAY)
    config = changed(config, {"data.validation": {"again": str(config.data.path)}, "train.eval_tokens": 72})
    [first, last] = replayed(config).of_kind("eval")
    assert "val_loss_ema" in first
    assert (
        last["sets"]["data"]["val_loss_ema"] == last["val_loss_ema"] != last["sets"]["again"]["val_loss_ema"]
    )


def test_a_run_without_an_average_has_none_to_export(tmp_path: Path) -> None:
    config = small_config("2bw", steps=2)
    replay(saving(config), recorder=Rows(), checkpoints=tmp_path)
    with pytest.raises(CheckpointError, match=r"keeps no average of its weights \(train.ema_decay: null\)"):
        weights_of(tmp_path, config, step=2, which=Weights.EMA)


@pytest.mark.parametrize("state", [{"averaged": -1}, {"averaged": 0}, {"average": []}])
def test_a_state_of_other_updates_is_refused(state: dict[str, Any]) -> None:
    known = {"average": [torch.zeros(2)], "averaged": 3}
    AveragedWeights(PlainUpdate(), decay=DECAY).load_state_dict(known)
    with pytest.raises(ValueError, match="an average of"):
        AveragedWeights(PlainUpdate(), decay=DECAY).load_state_dict(known | state)
