"""What users and sites export for SLURM's own commands (`SQUEUE_PARTITION`, ...) changes nothing here."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.cluster_runs import HABITS, ONE_RUN, launch, site_file, squeue, status_of, wait_for
from support.command_line import asyncpp, refusal, succeeded
from support.launches import HOURS, sweep

from asyncpp_cli.launch.common.supervisor import LIMIT_VARIABLE
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, RankStart
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State


def test_habits_change_nothing_that_is_believed_of_a_running_run(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(
        tmp_path / "e", *ONE_RUN, "matrix.seed=[0,1]", f"train.steps={HOURS}", "train.checkpoint_interval=0"
    )
    first, second = experiment.runs
    (tmp_path / "plain").mkdir()
    plain = site_file(tmp_path / "plain")
    # Exported here, and again by each job, as a site's `source ~/.bashrc` does.
    site = site_file(tmp_path, environment=HABITS, setup=["env > env.txt"], max_parallel=1)
    asked = ("doctor", "--site", site, "--dir", tmp_path, "--job", "--json")
    before = json.loads(succeeded(*(plain if word is site else word for word in asked)).output)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in HABITS.items():
            patched.setenv(name, value)
        doctor = json.loads(succeeded(*asked).output)
        assert [(check["check"], check["ok"]) for check in doctor] == [
            (check["check"], check["ok"]) for check in before
        ]
        submitted = launch(experiment.folder, "--replay", site=site)
        assert "Submitted 2 of 2 runs" in submitted
        assert "on testcluster, the cluster of slurm.conf: SLURM_CLUSTERS (1) is not read" in submitted
        wait_for(lambda: first.status().step > 0, seconds=100, why=lambda: (statuses(), tmp_path))

        def statuses() -> list[tuple[str, str]]:
            return [(run["state"], run["job_state"]) for run in status_of(experiment.folder)]

        assert statuses() == [("running", "RUNNING"), ("pending", "PENDING")]
        # SLURM told the job its time limit, which the ranks are to know.
        of_rank = Path(f"/proc/{first.status().pids[0]}/environ").read_text()
        assert f"{LIMIT_VARIABLE}=" in of_rank
        # SLURM's answers count, not only this machine's processes: as from a login node.
        elsewhere(first)
        assert statuses() == [("running", "RUNNING"), ("pending", "PENDING")]
        assert "0 of 2 runs completed, 2 queued or running" in launch(experiment.folder, site=site)
        for run, state in ((first, "running"), (second, "queued")):
            assert f"{run.id} is {state}" in refusal("remove", run.folder, "--yes")
        assert asyncpp("report", experiment.folder, "--format", "csv").code == 0
        ended = succeeded("cancel", experiment.folder)
        assert ended.errors == "Cancelled: 1 queued, 1 running.\n"
        wait_for(lambda: status_of(experiment.folder)[0]["job_state"] == "COMPLETED", seconds=60)
    assert (first.status().state, first.status().cause) == (State.INTERRUPTED, Cause.CANCELLED)
    assert first.saved_step == first.status().step > 0
    (environment,) = experiment.submissions.glob("*/env.txt")
    assert "SQUEUE_STATES=CD" in environment.read_text().splitlines()
    assert not squeue()


def elsewhere(run: Run) -> None:
    """Have the run's processes on a machine that cannot be looked at, which claimed the run some time ago."""
    attempt = Attempt(run, run.status().attempt)
    start, claimed = attempt.read(RankStart, 0), attempt.read(Claimed)
    assert start is not None
    assert claimed is not None
    processes = tuple(replace(process, host="elsewhere") for process in start.processes)
    attempt.write(structs.replace(start, processes=processes), 0)
    by = replace(claimed.by, host="elsewhere")
    attempt.write(structs.replace(claimed, by=by))
    os.utime(attempt.file(Claimed), (time.time() - 100,) * 2)
