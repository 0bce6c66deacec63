"""Runs are launched seed by seed, and record the load of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import asyncpp
from support.launches import sweep

from asyncpp_cli.report.analysis.conditions import CROWDED
from asyncpp_cli.runs.attempts.attempt import Attempt


@pytest.mark.slow
def test_all_arms_of_a_seed_come_before_the_next_seed(tmp_path: Path) -> None:
    matrix = "matrix={schedule: [1f1b, 2bw], optimizer: adamw, seed: [3, 1]}"
    experiment = sweep(tmp_path / "e", matrix, "exclude=[]", "train.steps=1")
    assert asyncpp("launch", experiment.folder, "--replay", "--max-parallel", "1").code == 0
    claimed = {
        cell.id: Attempt(experiment.run(cell.id), 1).description().claimed for cell in experiment.cells
    }
    in_order = sorted(experiment.cells, key=lambda cell: claimed[cell.id])
    assert [(cell.axes["seed"], cell.axes["schedule"]) for cell in in_order] == [
        (3, "1f1b"),
        (3, "2bw"),
        (1, "1f1b"),
        (1, "2bw"),
    ]
    for busy in (0.5, 3 * CROWDED):
        for run in experiment.runs:
            rows = run.metrics()
            loads = [row["load_per_core"] for row in rows if row["kind"] == "segment"]
            assert loads
            assert min(loads) >= 0
            changed = [row | {"load_per_core": busy} if "load_per_core" in row else row for row in rows]
            run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in changed))
        reported = " ".join(asyncpp("report", experiment.folder).output.split())
        assert ("busy during 4 of 4 runs: up to 3.8 processes per core" in reported) == (busy > CROWDED)
