"""A rank that ends on a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.attempts import claimed
from support.command_line import succeeded
from support.disks import disk, fill
from support.launches import TINY

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.settle import current_status, end_rank
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import process_id
from asyncpp_cli.runs.run_folder import Run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    with disk(tmp_path / "disk", megabytes=1) as folder:
        yield folder


@pytest.fixture
def run(small_disk: Path) -> Run:
    one_run = ["matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]"]
    succeeded("sweep", "quickstart", *TINY, *one_run, "--out", small_disk / "e")
    (run,) = open_experiment(small_disk / "e").runs
    return run


def begin(run: Run) -> Attempt:
    return claimed(run, processes=1, replay=True, steps=3)


@pytest.mark.slow
def test_a_rank_of_a_job_that_cannot_even_begin_says_so_in_a_line(run: Run, small_disk: Path) -> None:
    attempt = begin(run)
    fill(small_disk)
    job = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_NODEID": "0",
    }
    command = [
        sys.executable,
        "-m",
        "asyncpp_cli.launch.common.supervisor",
        str(run.folder),
        str(attempt.number),
    ]
    ended = subprocess.run(
        command, env=os.environ | job, capture_output=True, text=True, check=False, timeout=100
    )
    assert ended.returncode != 0
    assert "cannot be written (No space left on device: free some space)" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_rank_for_which_there_was_no_room_is_not_called_killed(run: Run, small_disk: Path) -> None:
    attempt = begin(run)
    with subprocess.Popen(["true"]) as child:
        attempt.record_start(0, process_id(child.pid))
    filled = fill(small_disk)
    end_rank(attempt, 0, code=1, signal_number=None, stopped=False)
    assert current_status(run).reason == "rank 0 ended without a record: no space is left on its disk"
    filled.unlink()
