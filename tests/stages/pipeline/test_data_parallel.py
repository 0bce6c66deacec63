"""Replicas of the pipeline: in processes and in replay the same bits, whoever updates what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.single_process import joined
from support.small_runs import Rows, small_config, with_experts
from support.training_cases import check_processes_are_replays, of_every_schedule, train_here

import stages.comm.reduction_rounds
from stages.comm.process import Process
from stages.config.run_config import RunConfig, changed
from stages.trainer import replay


def train_in_small_rounds(process: Process, config: RunConfig) -> list[dict[str, Any]]:
    """Exchange gradients in many rounds, of which several begin within the last backward of a flush."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.comm.reduction_rounds, "ROUND_BYTES", 2048)
        patch.setattr(stages.comm.reduction_rounds, "LEAST_PIECE", 1)
        return train_here(process, config)


@pytest.mark.slow
def test_processes_of_two_data_ranks_are_their_replays_bit_for_bit() -> None:
    """Every schedule, and a V with whole and with split backwards."""
    common: dict[str, Any] = {"data": 2, "microbatches": 4, "clip_norm": 0.3}
    folded: dict[str, Any] = common | {"coefficient": 1.0}
    configs = [
        *of_every_schedule(layers=4, **common),
        small_config("2bw-v", **folded),
        small_config("2bw-v", optimizer="muon", split=True, **folded),
        *(
            changed(small_config(name, **common), {"site.neighbours": "pipeline"})
            for name in ("1f1b", "2bw-v", "paci")
        ),
    ]
    for rows in check_processes_are_replays(configs, size=4, train=train_in_small_rounds):
        assert max(row["grad_norm"] for row in rows if row["kind"] == "step") > common["clip_norm"]


@pytest.mark.slow
def test_processes_of_three_data_ranks_add_in_the_order_of_the_ranks() -> None:
    """Around a ring, parts of the gradient would be added in other orders."""
    config = small_config("2bw", stages=1, data=3, optimizer="muon", clip_norm=0.3)
    check_processes_are_replays([config], size=3, train=train_in_small_rounds)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("soap", {}),
        ("basis-rotation", {}),
        ("basis-rotation", {"source": "first-moment"}),
        ("basis-rotation", {"geometry": "unilateral"}),
    ],
)
@pytest.mark.slow
def test_rotations_do_not_depend_on_the_layout(optimizer: str, options: dict[str, Any]) -> None:
    """Gradients of rank below their size: no axis of a null space comes from rounding, in 40 steps. Axes are
    exact to eps^(1/4), 1e-4, at worst (`in_range`), and a step is 5e-3."""
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "steps": 40,
        "eval_interval": 40,
        "precision": "float64",
    }
    runs = []
    for data in (1, 2):
        config = with_experts(small_config("2bw", data=data, microbatches=4 // data, **settings))
        config = changed(config, {"optimizer.options": {**options}})
        runs.append(replay(config, recorder=Rows()))
    assert runs[0].train_losses == pytest.approx(runs[1].train_losses, rel=1e-7)
    assert runs[0].val_losses == pytest.approx(runs[1].val_losses, rel=1e-7)
    weights = [joined(run.weights) for run in runs]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=5e-3 * 1e-2)
