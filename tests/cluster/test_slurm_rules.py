"""What we rely on SLURM for, each rule seen in a SLURM that runs: docs/slurm.md tells them to users."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cluster_runs import wait_for
from slurm_queue import squeue

from asyncpp_cli.cluster import slurm
from asyncpp_cli.cluster.job_states import KNOWN


@pytest.fixture
def sleepers(slurm_conf: Path, tmp_path: Path) -> str:
    """An array of three tasks that sleep, all running. SLURM's number for it."""
    array = sbatch("--array=0-2", f"--output={tmp_path}/%A_%a.out", "--requeue", "--wrap=exec sleep 600")
    wait_for(lambda: states(array) == ["RUNNING"] * 3, seconds=60, why=squeue)
    return array


def sbatch(*arguments: str) -> str:
    command = ["sbatch", "--parsable", "--time=10", *arguments]
    return subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout.strip()


def states(array: str) -> list[str]:
    """Of the array's tasks, by index."""
    lines = sorted(line.split("|") for line in squeue("%F", "%K", "%T"))
    return [state for job, _, state in lines if job == array]


@pytest.mark.timeout(120)
def test_one_task_has_the_arrays_own_id_and_is_told_from_the_array_by_its_name(sleepers: str) -> None:
    raw_ids = dict(line.split("|") for line in squeue("%F_%K", "%A"))
    (same,) = [task for task, raw in raw_ids.items() if raw == sleepers]
    # By the raw id SLURM takes it for the array.
    command = ["squeue", "-h", "-j", sleepers, "-o", "%T"]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["RUNNING"] * 3
    )
    assert slurm.state_of(same) == "RUNNING"
    assert slurm.end_of_job(same) is not None
    slurm.requeue(same)
    wait_for(lambda: slurm.state_of(same) == "PENDING", seconds=60, why=squeue)
    assert sorted(states(sleepers)) == ["PENDING", "RUNNING", "RUNNING"]


@pytest.mark.timeout(60)
def test_a_job_that_slurm_does_not_have_is_gone(slurm_conf: Path) -> None:
    assert slurm.state_of("999999_0") == "gone"
    assert slurm.end_of_job("999999") is None


@pytest.mark.timeout(60)
def test_no_word_of_this_slurm_for_a_state_is_undecided(slurm_conf: Path) -> None:
    """Asked for a state that it does not know, squeue lists those that it does."""
    asked = ["squeue", "--states=nonsense"]
    said = subprocess.run(asked, timeout=60, check=False, capture_output=True, text=True).stderr
    words = said.rpartition("Valid job states include: ")[2].strip().split(",")
    assert "SIGNALING" in words, said
    assert [word for word in words if word not in KNOWN] == []
