"""Every script in benchmarks/ that can run small runs small. Its figures are not looked at.

big_stage.py has a test of its own (test_lone_stage).
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.command_line import ran, succeeded
from support.files import ROOT
from support.launches import sweep

pytestmark = pytest.mark.slow

PIPELINE = "pipeline.py --ranks 2 --microbatches 2 --forward-ms 1 --rounds 1 --json"

PEER = "peer.py --device cpu --model micro --context 16 --microbatches 1 --steps 1 --segments 2 --json"

PRINTS_JSON = {
    PEER: "over transformers",
    PIPELINE: "speedup_by_round",
    f"{PIPELINE} --data 2 --reduce-ms 2 --spread-ms 1": "conditions",
    "action_overhead.py --turns 2 --json": "replay_over_plain_cpu_median",
    "optimizer_steps.py --models micro --steps 1 --device cpu --json": "ratio",
}
"""For each command something that it prints."""


def run(tmp_path: Path, script: str, *arguments: str | Path) -> str:
    ended = ran(sys.executable, ROOT / "benchmarks" / script, *arguments, cwd=tmp_path)
    assert ended.code == 0, ended.errors
    return ended.output


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="a slow link needs root and tc(8)"
)
def test_fully_shard_runs_beside_pipelines(tmp_path: Path) -> None:
    few = "--batches 4 --microbatches 2 --layers 2 --values 1024 --sequence-ms 1 --rounds 1"
    rows = json.loads(run(tmp_path, "fsdp.py", "--rates", "1000", *few.split(), "--json"))["rows"]
    assert [row["arm"] for row in rows] == ["1f1b", "2bw", "fully_shard", "fsdp", "gather", "reduce", "sum"]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="a slow link needs root and tc(8)"
)
def test_the_boundarys_arms_are_measured_as_planned(tmp_path: Path) -> None:
    few = "--ranks 2 --schedules zb-v --local-steps 2 --batches 4 --microbatches 4 --layers 4 --values 131072"
    given = [*few.split(), "--sequence-ms", "1", "--rounds", "1", "--csv", tmp_path / "raw.csv"]
    run(tmp_path, "fsdp.py", "--rates", "1000", *given)
    with (tmp_path / "raw.csv").open(newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["zb-v", "fully_shard", "fsdp", "local", "gather", "reduce", "sum"]
    # Three sleeps for each block and sequence, shared by the ranks; ZB-V waits less than 1F1B does.
    compute = 3 * 4 * 4 / 2 * 1e-3
    assert compute <= float(rows["local"]["seconds"])
    assert compute <= float(rows["zb-v"]["seconds"])
    # Messages go at the rate of the gather. A micro-batch has four between ranks, in turn at most.
    message, gathered = 128 * 256 * 4, 131_072 * 4 / 2
    messages = 4 * 4 * float(rows["gather"]["seconds"]) * message / gathered
    assert compute <= float(rows["zb-v"]["planned"]) <= compute * (4 + 2 - 1) / 4 + messages


def test_one_worker_in_local_steps_is_the_run_itself(tmp_path: Path) -> None:
    settings = ["matrix.schedule=[1f1b]", "matrix.optimizer=[muon]", "matrix.error_feedback=[false]"]
    settings += ["train.steps=4", "train.microbatch_size=4", "schedule.microbatches=1", "parallel.stages=1"]
    experiment = sweep(tmp_path / "e", "model=micro", "data.context=32", "train.eval_interval=4", *settings)
    (own,) = experiment.runs
    succeeded("train", own.folder, "--replay")
    alone, others = (
        next(csv.DictReader(io.StringIO(run(tmp_path, "local_steps.py", experiment.folder, *workers))))
        for workers in (("--workers", "1"), ("--workers", "4", "--every", "2"))
    )
    assert float(alone["val_loss"]) == pytest.approx(own.validation_losses()[4], rel=1e-5)
    assert float(others["val_loss"]) != pytest.approx(own.validation_losses()[4], rel=1e-4)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("command", PRINTS_JSON)
def test_prints_json(command: str, tmp_path: Path) -> None:
    printed = run(tmp_path, *command.split())
    json.loads(printed)
    assert f'"{PRINTS_JSON[command]}' in printed
