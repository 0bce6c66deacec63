"""What a start costs each rank does not grow with their number, but where benchmarks/start_up.py says so."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import ROOT


@pytest.mark.slow
def test_counts_per_rank_are_the_same_for_4_and_8_ranks() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "start_up.py")]
    options = ["--ranks", "4", "8", "--stages", "2", "--json"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    few, many = json.loads(ended.stdout)
    constant = (
        "sockets_other",
        "messages_per_rank",
        "files_start",
        "status_writes",
        "files_look",
        "files_end",
    )
    for key in constant:
        assert 0 < many[key] == few[key] < 20, key
    assert many["messages"] == 2 * few["messages"]
    # One per rank: rank 0's connections, and what the last rank reads to settle the run.
    for key in ("sockets_rank_0", "files_last"):
        assert many[key] - few[key] == 4, key
    # One per further data rank, with gloo.
    assert many["sockets_used"] - few["sockets_used"] <= 2
