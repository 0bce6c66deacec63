"""`asyncpp launch` started by srun, inside an allocation that asyncpp did not ask for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster_runs import ONE_RUN, outcomes, sweep

ASYNCPP = [sys.executable, "-P", "-m", "asyncpp_cli"]


def srun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command on nodes of the test cluster."""
    command = ["srun", "--mpi=none", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.usefixtures("slurm_conf")
def test_nodes_of_an_allocation_share_runs(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2", "matrix.seed=[0,1,2]").runs
    launch = [*ASYNCPP, "launch", tmp_path / "e", "--replay", "--max-parallel", "1"]
    ended = srun("-N", "2", "--ntasks-per-node", "1", *launch)
    assert ended.returncode == 0, ended.stderr
    assert [outcomes(run) for run in runs] == [[("completed", "")]] * 3
