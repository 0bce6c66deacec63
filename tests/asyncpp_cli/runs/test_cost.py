"""What runs have cost: hours of their attempts."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.attempts import claimed, fall
from support.command_line import asyncpp
from support.report_experiment import ExperimentFolder, metrics, settings

import asyncpp as api
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.cost import Cost, cost_of_run, cost_text, total
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status

HOUR = 3600.0


def attempted(run: Run, *, hours: float, processes: int, gpus: int, threads: int, failed: bool) -> Attempt:
    """Add an attempt that has taken these hours."""
    attempt = claimed(run, processes=processes, replay=False, steps=4, gpus=gpus, threads=threads)
    described = attempt.description()
    attempt.write(structs.replace(described, monotonic=described.monotonic - hours * HOUR))
    for rank in range(processes):
        attempt.record_start(rank, this_process())
    for rank in range(processes):
        fall(attempt, rank, int(failed))
    return attempt


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentFolder:
    return ExperimentFolder(tmp_path / "e")


def pending(experiment: ExperimentFolder, seed: int) -> Run:
    return experiment.add(settings("1f1b", "muon", seed=seed), status=Status(state=State.PENDING))


def test_all_attempts_of_a_run_count(experiment: ExperimentFolder) -> None:
    run = pending(experiment, 0)
    assert cost_of_run(run, run.status()) is None
    attempted(run, hours=2.0, processes=2, gpus=0, threads=3, failed=True)
    first = cost_of_run(run, run.status())
    assert first.gpu_hours == 0.0
    # Between the claim and the recorded ends some seconds pass at most.
    assert first.core_hours == pytest.approx(12.0, abs=0.2)
    attempted(run, hours=1.0, processes=4, gpus=4, threads=3, failed=False)
    both = cost_of_run(run, run.status())
    assert both.core_hours == first.core_hours
    assert both.gpu_hours == pytest.approx(4.0, abs=0.1)


def test_an_attempt_that_vanished_counts_to_its_last_heartbeat(experiment: ExperimentFolder) -> None:
    run = pending(experiment, 0)
    attempt = claimed(run, processes=1, replay=True, steps=4)
    gone = subprocess.Popen(["true"])
    gone.wait()
    described = attempt.description()
    attempt.write(structs.replace(described, by=replace(described.by, pid=gone.pid, start=1)))
    running = Status(state=State.RUNNING, attempt=1, steps=4, updated=described.claimed, seconds=3 * HOUR)
    run.write_status(running)
    assert cost_of_run(run, running) == Cost(core_hours=3.0)
    [record] = json.loads(asyncpp("status", experiment.folder, "--json").output)
    assert (record["state"], record["core_hours"]) == ("failed", 3.0)


def test_status_and_report_show_the_cost_per_cell_and_in_all(experiment: ExperimentFolder) -> None:
    for seed, hours in enumerate((1.0, 2.0)):
        attempted(pending(experiment, seed), hours=hours, processes=2, gpus=2, threads=1, failed=False)
    experiment.add(settings("2bw", "muon"), rows=metrics())
    shown = asyncpp("status", experiment.folder).output
    assert "3 completed; 6 GPU-hours" in shown
    assert "2 GPU-h" in shown
    assert "6 GPU-h" in asyncpp("status", experiment.folder, "--cells").output
    records = json.loads(asyncpp("report", experiment.folder, "--format", "json").output)
    by_schedule = {record["schedule"]: record for record in records}
    assert by_schedule["1f1b"]["gpu_hours"] == pytest.approx(6.0, abs=0.1)
    assert by_schedule["2bw"]["gpu_hours"] is None
    shown = asyncpp("report", experiment.folder).output
    assert "Cost of all runs and all their attempts: 6 GPU-hours" in shown
    assert api.open(experiment.folder).status()["gpu_hours"].to_list()[2] is None


def test_costs_are_added_where_they_are_known() -> None:
    assert total([None, None]) is None
    added = total([None, Cost(core_hours=1.0), Cost(gpu_hours=2.0)])
    assert added == Cost(gpu_hours=2.0, core_hours=1.0)
    assert cost_text(added) == "2 GPU-hours, 1 core-hours"
