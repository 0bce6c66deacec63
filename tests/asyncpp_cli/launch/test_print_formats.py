"""`launch --print`: what other schedulers are told of the runs; nothing is claimed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from support.command_line import asyncpp
from support.launches import sweep

from asyncpp_cli.runs.status import State

ONE_CELL = ["matrix={schedule: 2bw, optimizer: adamw, seed: [0, 1]}", "exclude=[]", "train.steps=2"]


def test_commands_of_the_runs_that_are_left_are_printed_and_nothing_is_claimed(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "a b;'c", *ONE_CELL)
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
    assert script.startswith("# 1 runs of 2 nodes")
    assert "#SBATCH --mem=3G" in script
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
