"""benchmarks/big_stage.py: a stage of the trainer by itself, on a processor and small."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from support.command_line import ran
from support.files import ROOT

SCRIPT = ROOT / "benchmarks" / "big_stage.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("results")
    sizes = ["--model", "micro", "--stages", "4", "--context", "16", "--steps", "2", "--segments", "2"]
    given = ["--device", "cpu", *sizes, "--peak-tflops", "1", "--json", "--out", str(folder)]
    # An arm that cannot be made ends its process, and no other.
    given += ["--schedules", "2bw,no-such,paci", "--recompute", "none,full"]
    ended = ran(sys.executable, SCRIPT, *given)
    assert ended.code == 0, ended.errors
    (written,) = folder.glob("big-stage-*.md")
    lines = written.read_text().splitlines()
    assert sum(line.startswith(("| 2bw |", "| paci |")) for line in lines) == 4
    found: list[dict[str, Any]] = json.loads(ended.output)["rows"]
    failed = [row for row in found if row["schedule"] == "no-such"]
    assert [row["why_not"] for row in failed] == ["ended with code 1"] * 2
    return [row for row in found if row not in failed]


@pytest.mark.slow
def test_memory_is_within_five_percent_of_the_planners(rows: list[dict[str, Any]]) -> None:
    versions = {row["schedule"]: row["versions"] for row in rows}
    assert versions == {"2bw": 2, "paci": 1}
    for row in rows:
        assert row["in_flight"] == 2
        assert row["planned_gb"] == pytest.approx(row["memory_gb"], rel=0.05)
    held = {(row["schedule"], row["recompute"]): row["memory_gb"] for row in rows}
    for recompute in ("none", "full"):
        assert held["2bw", recompute] > held["paci", recompute]


@pytest.mark.slow
def test_utilisation_counts_the_arithmetic_of_the_stage_alone(rows: list[dict[str, Any]]) -> None:
    # One block of `micro`, operations per token: six per parameter (two norms included), and attention.
    weights = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    operations = 6 * weights + 12 * 32 * 16
    for row in rows:
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * operations / 1e12)
