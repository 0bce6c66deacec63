"""Every script in benchmarks/ that can run small runs small. Its figures are not looked at.

big_stage.py has a test of its own (test_lone_stage).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.files import ROOT

pytestmark = pytest.mark.slow

PIPELINE = "pipeline.py --ranks 2 --microbatches 2 --forward-ms 1 --rounds 1 --json"

PRINTS_JSON = {
    PIPELINE: "speedup_by_round",
    f"{PIPELINE} --data 2 --reduce-ms 2 --spread-ms 1": "conditions",
    "action_overhead.py --turns 2 --json": "replay_over_plain_cpu_median",
    "optimizer_steps.py --models micro --steps 1 --device cpu --json": "ratio",
}
"""For each command something that it prints."""


def run(tmp_path: Path, script: str, *arguments: str | Path) -> str:
    ended = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="a slow link needs root and tc(8)"
)
def test_fully_shard_runs_beside_pipelines(tmp_path: Path) -> None:
    few = "--batches 4 --microbatches 2 --layers 2 --values 1024 --sequence-ms 1 --rounds 1"
    rows = json.loads(run(tmp_path, "fsdp.py", "--rates", "1000", *few.split(), "--json"))["rows"]
    assert [row["arm"] for row in rows] == ["1f1b", "2bw", "fully_shard", "gather", "reduce"]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("command", PRINTS_JSON)
def test_prints_json(command: str, tmp_path: Path) -> None:
    printed = run(tmp_path, *command.split())
    json.loads(printed)
    assert f'"{PRINTS_JSON[command]}' in printed
