"""A node that fails a run is left out of what runs next."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cluster_runs import ONE_RUN, launch, outcomes, site_file, sweep, wait_for
from support.command_line import asyncpp
from support.slurm_queue import hurry, squeue

from asyncpp_cli.launch.sites import find_site
from asyncpp_cli.launch.slurm.node_exclusion import excluded_nodes_at
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State

BROKEN = """\
import os, sys
from pathlib import Path

node = os.environ.get("SLURMD_NODENAME", "")
if "train" in sys.orig_argv and node == "{node}":
    sys.exit("RuntimeError: CUDA error: uncorrectable ECC error encountered")
"""


@pytest.mark.timeout(300)
def test_a_run_without_retries_goes_on_elsewhere(slurm_conf: Path, tmp_path: Path) -> None:
    gpus = tmp_path / "gpus"
    gpus.mkdir()
    (gpus / "sitecustomize.py").write_text(BROKEN.format(node="n3"))
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2", "matrix.seed=[0,1]")
    # One job waits for the other, and SLURM begins with n3.
    site = site_file(
        tmp_path, retries=0, environment={"PYTHONPATH": str(gpus)}, exclude="n[1-2]", max_parallel=1
    )
    launch(experiment.folder, "--replay", site=site)
    wait_for(lambda: completed(*experiment.runs), seconds=200, why=lambda: (squeue(), told(experiment.runs)))
    first, second = experiment.runs
    assert outcomes(first) == [("interrupted", "restarted"), ("completed", "")]
    assert [nodes(first, number) for number in (1, 2)] == ["n3", "n4"]
    # It waited when n3 failed the first.
    assert (outcomes(second), nodes(second, 1)) == ([("completed", "")], "n4")
    shown = asyncpp("status", experiment.folder)
    assert "Node n3 is excluded from new attempts until" in shown.errors
    assert "uncorrectable ECC error" in shown.errors
    # What is submitted next leaves it out as well.
    assert excluded_nodes_at(find_site(str(site)), experiment, needed=1) == "n[1-2],n3"


def completed(*runs: Run) -> bool:
    hurry()
    assert squeue() or all(run.status().state != State.FAILED for run in runs), told(runs)
    return all(run.status().state == State.COMPLETED for run in runs)


def nodes(run: Run, number: int) -> str:
    job = Attempt(run, number).job
    return job.nodes if job else ""


def told(runs: tuple[Run, ...]) -> object:
    return [(run.status(), outcomes(run)) for run in runs]
