"""The rehearsal: what a twin keeps, and that a mistake in a cell shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import succeeded

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.launch.dry_run import twin_of
from asyncpp_cli.runs.experiment_folder import open_experiment
from stages.validation import check


def test_a_twin_keeps_what_may_be_wrong_and_is_small() -> None:
    changes = [
        "matrix={schedule: 2bw, optimizer: muon, error_feedback: 0.5, model: 360m, seed: [0, 1]}",
        "parallel.stages=16",
        "schedule.microbatches=32",
        "exclude=[]",
        "train.precision=bfloat16",
        "optimizer.lr=3e-4",
    ]
    first, second = (resolved.config for resolved in expand(load("quickstart", changes)))
    twin = twin_of(first)
    check(twin)
    assert twin == twin_of(second)
    assert twin.schedule == first.schedule
    assert twin.optimizer == first.optimizer
    assert twin.error_feedback == first.error_feedback
    assert twin.parallel == first.parallel
    assert (twin.train.precision, twin.train.clip) == ("bfloat16", first.train.clip)
    assert twin.model.layers == 16
    assert twin.model.heads > twin.model.kv_heads
    assert twin.model.width * twin.model.mlp_width < 10_000
    ungrouped = replace(first, model=replace(first.model, kv_heads=first.model.heads))
    assert twin_of(ungrouped).model.kv_heads == twin_of(ungrouped).model.heads
    many = replace(first, parallel=replace(first.parallel, data=16))
    assert twin_of(many).parallel == replace(first.parallel, data=2)


def test_a_twin_of_a_mixture_has_few_small_experts() -> None:
    matrix = "matrix={schedule: 2bw, optimizer: adamw, error_feedback: false, model: 10b-moe, seed: [0]}"
    [resolved] = expand(load("quickstart", [matrix, "exclude=[]", "model.shared_experts=2"]))
    config = resolved.config
    config.model.dense_layers = 3
    twin = twin_of(config)
    check(twin)
    assert (twin.model.experts, twin.model.active_experts, twin.model.expert_width) == (4, 2, 32)
    assert (twin.model.shared_experts, twin.model.dense_layers, twin.model.layers) == (1, 1, 2)
    config.parallel.stages = 1
    assert twin_of(config).model.dense_layers == 0


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_dry_run_trains_each_twin_once_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    changes = ["matrix.seed=[0,1,2]", "matrix.optimizer=adamw", "matrix.error_feedback=false", "model=135m"]
    succeeded("sweep", "quickstart", *changes, "--out", folder)
    before = sorted(folder.rglob("*"))
    rehearsed = succeeded("launch", folder, "--dry-run", "--replay")
    assert "Training 2 small twins" in rehearsed.errors
    assert "6 of 6 cells ok" in rehearsed.output
    for cell in open_experiment(folder).cells:
        assert cell.id in rehearsed.output
    assert sorted(folder.rglob("*")) == before
