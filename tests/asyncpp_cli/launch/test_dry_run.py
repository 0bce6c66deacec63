"""Before a run trains: its small twin, and what other schedulers are told of it by `launch --print`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp, succeeded
from support.launches import sweep

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.launch import dry_run
from asyncpp_cli.launch.dry_run import twin_of
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.resources import Machine
from stages.config.run_config import changed
from stages.data import text
from stages.data.text import text_files
from stages.resolve.checks import check


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
    config = changed(config, {"model.dense_layers": 3})
    twin = twin_of(config)
    check(twin)
    assert (twin.model.experts, twin.model.active_experts, twin.model.expert_width) == (4, 2, 32)
    assert (twin.model.shared_experts, twin.model.dense_layers, twin.model.layers) == (1, 1, 2)
    config = changed(config, {"parallel.stages": 1})
    assert twin_of(config).model.dense_layers == 0


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


def test_cells_that_differ_in_numbers_share_a_twin_and_the_time_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = "optimizer.lr: [1e-3, 2e-3], error_feedback: [0, 0.5, 1], schedule.microbatches: [4, 8]"
    experiment = sweep(
        tmp_path / "e", f"matrix={{schedule: 2bw, optimizer: [adamw, muon], {axes}}}", "exclude=[]"
    )
    trained: list[str] = []

    def train(cells: list[Any], *_: object, **_options: object) -> dict[str, str]:
        trained.extend(cell.twin_id for cell in cells)
        return {cell.twin_id: "it broke" * ("adamw-ef0-" in cell.twin_id) for cell in cells}

    monkeypatch.setattr(dry_run, "_train", train)
    monkeypatch.setattr(dry_run, "this_machine", lambda: Machine(cores=2, gpus=()))
    ended = asyncpp("launch", experiment.folder, "--dry-run")
    # Of optimizers, with and without error feedback, numbers of micro-batches.
    assert len(set(trained)) == len(trained) == 8
    assert (
        "Training 8 small twins, one per kind of cell, for 4 steps each: about 80 seconds if" in ended.errors
    )
    assert ended.code == 1
    assert "dry run, 20 of 24 cells ok" in ended.output


ONE_CELL = ["matrix={schedule: 2bw, optimizer: adamw, seed: [0, 1]}", "exclude=[]", "train.steps=2"]


def test_commands_of_the_runs_that_are_left_are_printed_and_nothing_is_claimed(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "a b;'c", *ONE_CELL, "name='a b\nc'")
    first, second = experiment.runs
    assert asyncpp("train", first.folder, "--replay").code == 0
    text = asyncpp("launch", experiment.folder, "--print", "commands").output
    comment, command = text.splitlines()
    assert comment.startswith(f"# {second.id}: 1 node, 2 tasks")
    assert shlex.split(command)[-4:] == ["-m", "asyncpp_cli", "train", str(second.folder)]
    profile = tmp_path / "site.yaml"
    profile.write_text("{description: nodes, memory: 3G, tasks_per_node: 1}")
    [row] = json.loads(asyncpp("launch", experiment.folder, "--print", "json", "--site", profile).output)
    assert (row["shape"]["nodes"], row["shape"]["tasks"], row["memory"]) == (2, 2, "3G")
    assert [f"--node-rank {node}" in line for node, line in enumerate(row["node_commands"])] == [True, True]
    script = asyncpp("launch", experiment.folder, "--print", "sbatch", "--site", profile).output
    preview, runs, _ = script.split("\n", 2)
    assert preview.startswith("# A preview: `launch --site site` submits it")
    assert str(profile) in preview
    assert runs.startswith("# 1 runs of 2 nodes")
    assert "#SBATCH --job-name=asyncpp-a_b_c-NAME-1\n" in script
    assert re.search("^#SBATCH --mem=3G +# memory$", script, re.MULTILINE)
    assert second.id in script
    assert first.id not in script
    assert not (experiment.folder / "submissions").exists()
    assert second.status().state == State.PENDING
    assert not second.attempts.exists()


def test_wrong_words_are_refused_in_one_line(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *ONE_CELL)

    def refused(*arguments: str | Path) -> str:
        ended = asyncpp("launch", experiment.folder, *arguments)
        assert (ended.code, ended.output, ended.errors.count("\n")) == (2, "", 1)
        return ended.errors

    assert "accepted: sbatch, commands, json" in refused("--print", "helm")
    assert "accepted with --site NAME of a cluster" in refused("--print", "sbatch")
    assert "--print takes only" in refused("--print", "json", "--wait")


def test_the_data_of_runs_that_are_printed_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = sweep(tmp_path / "e", *ONE_CELL)
    looks = []
    monkeypatch.setattr(text, "text_files", lambda config: looks.append(config) or text_files(config))
    rows = json.loads(succeeded("launch", experiment.folder, "--print", "json").output)
    assert (len(rows), len(looks)) == (2, 1)
