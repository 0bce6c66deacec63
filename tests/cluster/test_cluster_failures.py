"""Runs that fail by themselves, lose a rank, or are on a cluster that keeps no accounts."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.cluster_runs import (
    ONE_RUN,
    launch,
    outcomes,
    set_partition,
    site_file,
    squeue,
    status_of,
    sweep,
    wait_for,
    wait_until_it_trains,
    without_accounting,
)
from support.command_line import asyncpp, succeeded
from support.files import edit

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, Outcome, RankStart
from asyncpp_cli.runs.status import State

HOURS = 1_000_000


def test_without_accounting_a_run_that_always_fails_is_tried_as_often_as_told(
    slurm_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(without_accounting(slurm_conf, tmp_path)))
    asked = subprocess.run(["sacct"], capture_output=True, text=True, timeout=60, check=False)
    assert asked.returncode != 0

    text = tmp_path / "text.txt"
    text.write_text("some words to train on, again and again. " * 500)
    changes = [*ONE_RUN, "train.steps=2", "matrix.seed=[0,1]", f"zip={{data.path: ['{text}', null]}}"]
    experiment = sweep(tmp_path / "e", *changes, "exclude=[{seed: 0, data.path: null}, {seed: 1, data.path: "
                       f"'{text}'}}]")  # fmt: skip
    failing, good = experiment.runs
    site = site_file(tmp_path, retries=2, submit_limit=1)
    set_partition("down")
    said = launch(experiment.folder, "--replay", site=site)
    assert "Submitted 1 of 2 runs" in said
    assert "1 runs exceed" in said
    assert len(squeue()) == 1
    text.unlink()
    set_partition("up")
    followed = asyncpp("launch", experiment.folder, "--site", site, "--replay", "--wait")
    # As soon as there was room it submitted the other.
    assert followed.code == 1
    assert "1 of 2 runs completed" in followed.errors
    assert good.status().state == State.COMPLETED
    assert outcomes(failing) == [("failed", "error")] * 3
    by_id = {run["id"]: run for run in status_of(experiment.folder)}
    told = by_id[failing.id]
    assert (told["state"], told["attempt"], told["job_state"]) == ("failed", 3, "")
    assert "text.txt" in told["reason"]
    assert any("text.txt" in line for line in told["error_lines"])
    assert told["nodes"].startswith("n")

    text.write_text("some words to train on, again and again. " * 500)
    succeeded("launch", experiment.folder, "--failed", "--replay", "--site", site, "--wait")
    assert [run.status().state for run in experiment.runs] == [State.COMPLETED] * 2
    assert good.status().attempt == 1


def test_a_dead_rank_ends_the_step_everywhere_and_is_named(slurm_conf: Path, tmp_path: Path) -> None:
    changes = [*ONE_RUN, f"train.steps={HOURS}", "train.checkpoint_interval=0", "site.timeout=40"]
    experiment = sweep(tmp_path / "e", *changes)
    (run,) = experiment.runs
    launch(experiment.folder, site=site_file(tmp_path, retries=1))
    wait_until_it_trains(run, 1)
    os.kill(run.status().pids[1], signal.SIGKILL)
    wait_until_it_trains(run, 2)
    outcome = Attempt(run, 1).read(Outcome)
    assert outcome is not None
    assert outcome.reason.startswith("rank 1 was killed by SIGKILL")

    # With its supervisor it ends without a word; srun ends the other for it.
    trainer, supervisor = Attempt(run, 2).processes(1)
    os.kill(supervisor.pid, signal.SIGKILL)
    os.kill(trainer.pid, signal.SIGKILL)
    wait_for(lambda: not squeue(), seconds=100, why=lambda: (run.status(), squeue()))
    assert (run.status().state, run.status().attempt) == (State.FAILED, 2)
    assert run.status().reason.startswith("rank 1 vanished")
    assert [state for state, _ in outcomes(run)] == ["failed", "failed"]


def test_an_attempt_on_another_machine_is_over_when_its_job_is(slurm_conf: Path, tmp_path: Path) -> None:
    """Its processes cannot be looked at, but SLURM can be asked."""
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2")
    (run,) = experiment.runs
    launch(experiment.folder, "--replay", "--wait", site=site_file(tmp_path))
    # The job still looks how its ranks ended, and would start a run again that it finds without an end.
    wait_for(lambda: not squeue(), seconds=100, why=squeue)
    completed = run.status()
    attempt = Attempt(run, 1)
    start, claimed = attempt.read(RankStart, 0), attempt.read(Claimed)
    assert start is not None
    assert claimed is not None
    processes = tuple(replace(process, host="elsewhere") for process in start.processes)
    attempt.write(structs.replace(start, processes=processes), 0)
    by = replace(claimed.by, host="elsewhere")
    attempt.write(structs.replace(claimed, by=by, claimed=claimed.claimed - 100))
    (attempt.folder / "rank-0.end.json").unlink()
    edit(run.status_file, state="running")
    assert run.status().state == State.RUNNING
    # The accounts come after the queue.
    wait_for(lambda: status_of(experiment.folder)[0]["state"] != "running", seconds=100, why=squeue)
    (told,) = status_of(experiment.folder)
    assert (told["state"], told["attempt"], told["steps"]) == ("failed", 1, completed.steps)
    assert told["reason"].startswith("rank 0 vanished")
