"""Runs over several nodes, hundreds of them, and launches that are refused, killed or repeated."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.cluster_runs import (
    ONE_RUN,
    launch,
    outcomes,
    set_partition,
    site_file,
    squeue,
    starts,
    status_of,
    sweep,
    wait_for,
)
from support.command_line import asyncpp, refusal, succeeded
from support.files import ROOT, write_program
from support.launches import ONE, most_at_once, started_process, weights

from asyncpp_cli.base.errors import INTERRUPTED
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.status import Cause, State

MANY = [*ONE, "train.steps=2"]


def test_the_quickstart_over_two_nodes_a_run_gives_the_weights_of_this_machine(
    slurm_conf: Path, tmp_path: Path
) -> None:
    # A norm of shards is rounded otherwise than one of whole matrices.
    arms = ["matrix.schedule=[fsdp, 2bw]", "exclude=[{schedule: fsdp, error_feedback: true}]"]
    changes = ["train.steps=6", "matrix.optimizer=muon", "train.clip=none", *arms]
    here = sweep(tmp_path / "here", *changes)
    there = sweep(tmp_path / "a b;'c\"$(touch x)", *changes)
    # This process trains here, while the cluster's nodes work.
    said = launch(there.folder, "--max-parallel", "2", site=Path("testcluster"))
    assert "Submitted 3 of 3 runs to testcluster as 1 array" in said
    for run in here.runs:
        succeeded("train", run.folder, "--replay")
    wait_for(lambda: not squeue(), seconds=200, why=squeue)
    for run in there.runs:
        assert (run.status().state, run.status().attempt) == (State.COMPLETED, 1), run.status().reason
        assert weights(run) == weights(here.run(run.id))
        job = Attempt(run, 1).job
        assert job is not None
        assert job.nodes in ("n[1-2]", "n[3-4]", "n[1,3]", "n[2,4]", "n[2-3]", "n[1,4]")

    def accounted() -> set[tuple[str, str]]:
        return {(run["job_state"], run["job_id"].partition("_")[2]) for run in status_of(there.folder)}

    # The jobs have left the queue: this is the accounting's word, which comes later.
    completed = {("COMPLETED", str(index)) for index in range(3)}
    wait_for(lambda: accounted() == completed, seconds=60, why=accounted)
    assert not [file for file in tmp_path.rglob("x") if file.name == "x"]
    assert not Path("x").exists()


def test_two_hundred_runs_in_two_shapes(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(
        tmp_path / "e",
        *MANY,
        f"matrix.seed=[{','.join(map(str, range(100)))}]",
        "matrix.parallel.stages=[1,2]",
    )
    site = site_file(tmp_path, time="5", memory="200M")
    set_partition("down")
    said = launch(experiment.folder, "--max-parallel", "6", site=site)
    assert "Submitted 200 of 200 runs to site as 4 arrays" in said
    tasks = Counter(line.partition("_")[0] for line in squeue())
    assert sorted(tasks.values()) == [50, 50, 50, 50]
    assert "0 of 200 runs completed, 200 queued" in launch(experiment.folder, site=site)
    assert len(squeue()) == 200
    run_status = status_of(experiment.folder)
    assert {(run["state"], run["job_state"], run["pending_reason"]) for run in run_status} == {
        ("pending", "PENDING", "PartitionDown")
    }
    set_partition("up")
    wait_for(lambda: completed(experiment.folder) >= 2, seconds=120, why=squeue)
    succeeded("cancel", experiment.folder)
    # SLURM shows a job that has ended until its nodes are cleaned up.
    wait_for(lambda: squeue() == [], seconds=60, why=squeue)
    set_partition("down")
    done = completed(experiment.folder)
    states = Counter(run["state"] for run in status_of(experiment.folder))
    assert set(states) <= {"completed", "pending", "interrupted"}, states
    said = launch(experiment.folder, site=site)
    assert f"Submitted {200 - done} of 200 runs" in said
    assert len(squeue()) == 200 - done
    some = experiment.runs[-3:]
    succeeded("cancel", experiment.folder, *(run.id for run in some))
    assert len(squeue()) == 197 - done
    assert "Submitted 3 of 200 runs" in launch(experiment.folder, site=site)


def completed(folder: Path) -> int:
    return sum(run["state"] == "completed" for run in status_of(folder))


def test_more_arrays_than_runs_at_once(slurm_conf: Path, tmp_path: Path) -> None:
    queued_up = sweep(tmp_path / "a", *MANY, "matrix.seed=[0,1,2,3]")
    uneven = sweep(tmp_path / "b", *MANY, "matrix.seed=[0,1,2,3]")
    two_at_once = ["--replay", "--max-parallel", "2"]
    said = launch(queued_up.folder, *two_at_once, site=site_file(tmp_path, array_limit=1))
    assert "as 4 arrays, at most 1 runs at once:" in said
    assert said.count("1 at once, when job ") == 3
    said = launch(uneven.folder, *two_at_once, site=site_file(tmp_path, array_limit=3))
    assert "as 2 arrays, at most 2 runs at once:" in said
    wait_for(lambda: not squeue(), seconds=250, why=squeue)
    for experiment in (queued_up, uneven):
        assert [run.status().state for run in experiment.runs] == [State.COMPLETED] * 4
        assert most_at_once(experiment) <= 2


def test_a_launch_killed_at_any_time_loses_nothing(
    slurm_conf: Path, tmp_path: Path, chance: random.Random
) -> None:
    seeds = f"matrix.seed=[{','.join(map(str, range(60)))}]"
    experiment = sweep(tmp_path / "e", *MANY, seeds, "matrix.parallel.stages=[1,2]")
    site = site_file(tmp_path)
    set_partition("down")
    command = [sys.executable, "-P", "-m", "asyncpp_cli", "launch", str(experiment.folder), "--wait"]
    for _ in range(4):
        waited = chance.uniform(0.4, 2.5)
        with started_process([*command, "--site", str(site)], stderr=subprocess.DEVNULL) as launching:
            time.sleep(waited)
            launching.kill()
    launch(experiment.folder, site=site)
    queued = [(run["job_id"], run["job_state"]) for run in status_of(experiment.folder)]
    assert {state for _, state in queued} == {"PENDING"}
    # Every run has its own place in the queue, and the queue has no other.
    assert sorted(job for job, _ in queued) == sorted(line.partition("|")[0] for line in squeue())


def test_a_refusal_of_sbatch_is_shown_once_and_nothing_stays_queued(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *MANY, "matrix.parallel.stages=[1,2]")
    cases = {
        "nowhere": ("partition", "invalid partition specified: nowhere", "1 run of 1 node, 1 task of 1 CPU"),
        "single": (
            "max_nodes, tasks_per_node, partition",
            "Node count",
            "1 run of 2 nodes, 2 tasks of 1 CPU",
        ),
    }
    for partition, (keys, words, shape) in cases.items():
        site = site_file(tmp_path, partition=partition)
        refused = asyncpp("launch", experiment.folder, "--site", site)
        assert refused.code == 2, refused.errors
        assert refused.errors.startswith(f"asyncpp: error: {site}: {keys}: sbatch: ")
        assert shape in refused.errors
        assert refused.errors.count(words) == 1, refused.errors
        assert refused.errors.count("\n") == 1
        # What SLURM had taken before may have begun, and then takes a moment to end.
        wait_for(lambda: not squeue(), seconds=60, why=squeue)
        assert {run["job_id"] for run in status_of(experiment.folder)} == {""}
    # What was withdrawn does not stand in the way.
    set_partition("down")
    assert "Submitted 2 of 2" in launch(experiment.folder, site=site_file(tmp_path))


def test_what_was_queued_though_sbatch_had_no_answer_is_withdrawn_or_known(
    slurm_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = sweep(tmp_path / "e", *MANY, "matrix.parallel.stages=[1,2]")
    site = site_file(tmp_path)
    set_partition("down")
    programs = tmp_path / "programs"
    programs.mkdir()
    # The second array is queued, and sbatch has given up waiting for the answer.
    write_program(
        programs / "sbatch",
        f'{shutil.which("sbatch")} "$@" || exit',
        f"[ -e {programs}/first ] || {{ touch {programs}/first; exit 0; }}",
        "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2",
        "exit 1",
    )
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert "Socket timed out" in refusal("launch", experiment.folder, "--site", site)
    assert squeue() == []
    # SLURM does not take the jobs back, either: then the next launch knows of them.
    (programs / "first").unlink()
    write_program(programs / "scancel", "echo 'scancel: error: Socket timed out' >&2", "exit 1")
    refused = refusal("launch", experiment.folder, "--site", site)
    assert "jobs of this launch may be queued all the same (scancel: Socket timed out)" in refused
    assert len(squeue()) == 2
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    assert "0 of 2 runs completed, 2 queued" in launch(experiment.folder, site=site)
    assert len(squeue()) == 2


def test_a_launch_interrupted_while_it_submits_says_what_becomes_of_its_jobs(
    slurm_conf: Path, tmp_path: Path
) -> None:
    experiment = sweep(tmp_path / "e", *MANY, "matrix.parallel.stages=[1,2]")
    set_partition("down")
    programs = tmp_path / "programs"
    programs.mkdir()
    write_program(
        programs / "sbatch",
        f"[ -e {programs}/first ] && exec sleep 60; touch {programs}/first",
        f'exec {shutil.which("sbatch")} "$@"',
    )
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [sys.executable, "-P", "-m", "asyncpp_cli", "launch", str(experiment.folder)]
    with started_process(
        [*command, "--site", str(site_file(tmp_path))], env=environment, stderr=subprocess.PIPE, text=True
    ) as launching:
        wait_for(squeue, seconds=60)
        time.sleep(1)
        launching.send_signal(signal.SIGINT)
        _, errors = launching.communicate(timeout=60)
    assert launching.returncode == INTERRUPTED
    assert errors.startswith("Jobs that are queued are not affected: asyncpp status")
    assert len(squeue()) == 1


def test_jobs_run_the_code_and_the_configuration_of_their_submission(
    slurm_conf: Path, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for package in ("asyncpp", "asyncpp_cli", "stages", "schedules", "optimizers", "templates"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    changes = [*ONE_RUN, "matrix.seed=[0,1]", "train.steps=2"]
    experiment = sweep(tmp_path / "e", *changes)
    kept, changed = experiment.runs
    site = site_file(tmp_path)
    set_partition("down")
    command = [sys.executable, "-P", "-m", "asyncpp_cli", "launch", experiment.folder, "--site", site]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run([*command, "--replay"], env=environment, timeout=280, check=True, capture_output=True)
    (checkout / "stages" / "trainer.py").write_text("raise RuntimeError('edited while the job waits')")
    text = changed.config_file.read_text()
    changed.config_file.write_text(text.replace("steps: 2", "steps: 3"))
    set_partition("up")
    wait_for(lambda: not squeue(), seconds=100, why=squeue)
    assert kept.status().state == State.COMPLETED, kept.status().reason
    assert (changed.status().state, changed.status().cause) == (State.FAILED, Cause.REFUSED)
    assert "config.yaml has changed since it was submitted" in changed.status().reason
    assert outcomes(changed) == [("failed", "refused")]
    # As it was it may run.
    changed.config_file.write_text(text)
    launch(experiment.folder, "--replay", "--wait", site=site)
    assert (changed.status().state, starts(changed)) == (State.COMPLETED, [(2, 0)])
