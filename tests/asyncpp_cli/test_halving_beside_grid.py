"""benchmarks/halving_beside_grid.py: what halving and the grid say of each arm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.tuned_experiment import record, tuned_experiment

from benchmarks.halving_beside_grid import page


def test_an_arm_whose_best_was_left_behind_is_told(tmp_path: Path) -> None:
    experiment = tuned_experiment(tmp_path / "e")
    with pytest.raises(SystemExit, match="6 runs have not ended"):
        page([str(experiment.folder)])
    ends = {"1f1b": [3.0, 1.8, 1.7, math.nan], "2bw": [3.0, 2.6, 2.5, 1.9]}
    for schedule, losses in ends.items():
        runs = [experiment.run(cell.id) for cell in experiment.cells if cell.axes["schedule"] == schedule]
        for run, loss in zip(runs, losses, strict=True):
            rungs = {row["step"]: row["val_loss"] for row in run.metrics() if row["kind"] == "eval"}
            record(run, {**rungs, 16: loss})
    lines = page([str(experiment.folder)]).splitlines()
    assert (
        "| schedule=1f1b | 0.001 | 0.01 | 0.1000 | 0.0001: 3.000, 0.001: 1.800, 0.01: 1.700, 0.1: nan |"
        in lines[2]
    )
    assert "| schedule=2bw | 0.1 | 0.1 | 0.0000 |" in lines[3]
    assert lines[-1] == "The same in 1 of 2 arms, with 48 steps instead of 128."
