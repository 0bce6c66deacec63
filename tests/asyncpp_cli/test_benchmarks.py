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
from support.texts import some_documents, write_lines, write_tokenizer

pytestmark = pytest.mark.slow

PIPELINE = "pipeline.py --ranks 2 --microbatches 2 --forward-ms 1 --rounds 1 --json"

PRINTS_JSON = {
    PIPELINE: "speedup_by_round",
    f"{PIPELINE} --data 2 --reduce-ms 2": "conditions",
    "action_overhead.py --turns 2 --json": "replay_over_plain_cpu_median",
    "schedule_sizes.py --most 16 --json": "simulate_s",
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


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("command", PRINTS_JSON)
def test_prints_json(command: str, tmp_path: Path) -> None:
    printed = run(tmp_path, *command.split())
    json.loads(printed)
    assert f'"{PRINTS_JSON[command]}' in printed


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and tc(8)")
def test_slow_link(tmp_path: Path) -> None:
    sizes = ["--rates", "500", "--rounds", "1", "--microbatches", "2", "--forward-ms", "1"]
    run(tmp_path, "slow_link.py", *sizes, "--out", tmp_path)
    (written,) = tmp_path.glob("slow-link-*.md")
    assert "tokens/s of 2bw over 1f1b" in written.read_text()
    (raw,) = tmp_path.glob("slow-link-*.csv")
    assert raw.read_text().startswith("mbit,round,seconds_1f1b,seconds_2bw,planned\n500.0,0,")


@pytest.mark.usefixtures("own_cache")
def test_tokenizing(tmp_path: Path) -> None:
    write_lines(tmp_path / "text.jsonl", some_documents(100))
    write_tokenizer(tmp_path / "tokenizer.json")
    run(tmp_path, "tokenizing.py", "text.jsonl", "tokenizer.json", "--out", tmp_path, "--repeat", "1")
    (written,) = tmp_path.glob("tokenizing-*.md")
    assert "| library_alone_s |" in written.read_text()
