"""Launches of many runs, of which launchers, supervisors and ranks are killed while all clocks step.

They end with the rows and weights of runs that nobody disturbed, no checkpoint is lost, and none is damaged.
ASYNCPP_TEST_KILLS=100 kills that often.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from support.command_line import succeeded
from support.launches import (
    HOUR,
    Launched,
    SetClock,
    StartLaunch,
    check_same,
    hours_off,
    is_training,
    processes_of,
    stepping,
    sweep,
    train_all,
)

from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import is_gone, send_signal
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from stages.checkpoint import files as checkpoint_files

KILLS = int(os.environ.get("ASYNCPP_TEST_KILLS", "4"))
SEEDS = -(-KILLS // 10)
"""Of four runs each."""
STEPS, INTERVAL = 100, 20
CHANGES = [
    *(f"matrix={{seed: {list(range(SEEDS))}}}", "exclude=[]"),
    "zip={schedule: [2bw, pipedream, paci, fsdp], error_feedback: [true, false, false, false], "
    "optimizer: [muon, muon, adamw, muon], "
    "train.clip: [global, stage, stage, none]}",  # a norm of shards is rounded otherwise
    *(f"train.steps={STEPS}", "train.eval_interval=50", f"train.checkpoint_interval={INTERVAL}"),
]


def unfinished(experiment: Experiment) -> set[Path]:
    """Checkpoints that are being written, or were when a process was killed."""
    return set(experiment.folder.glob("runs/*/checkpoints/.writing-*"))


def wait_for_a_moment(experiment: Experiment, launched: Launched, chance: random.Random) -> None:
    """Wait while processes start, train or save, but no longer than the launch lasts."""
    moment = chance.choice(["any", "training", "saving"])
    before = unfinished(experiment)
    while launched.process.poll() is None and moment != "any":
        if moment == "training" and any(is_training(run) for run in experiment.runs):
            break
        if moment == "saving" and unfinished(experiment) - before:
            break
        time.sleep(0.0005)
    time.sleep(chance.uniform(0.0, {"any": 8.0, "training": 1.0, "saving": 0.01}[moment]))


def check_checkpoints(run: Run) -> None:
    """Each attempt began where the one before had saved last, and every checkpoint is whole."""
    step = 0
    whole_lines = [line for line in run.metrics_file.read_text().splitlines() if line.endswith("}")]
    for row in map(json.loads, whole_lines):
        if row["kind"] == "start":
            # The one that it was killed in while it saved, and the interval after it: the row of the last
            # step is written before the drain waits for what is being saved.
            assert step - 2 * INTERVAL <= row["step"] <= step, run.id
            assert row["step"] % INTERVAL == 0
        step = row.get("step", step)
    assert not any("is not used" in log.read_text() for log in run.logs.rglob("*") if log.is_file())
    for saved in checkpoint_files.saved_steps(run.checkpoints):
        folder = checkpoint_files.folder_of(run.checkpoints, saved)
        assert not checkpoint_files.damage(folder, checkpoint_files.read_manifest(folder).items())


@pytest.mark.timeout(600 + 100 * KILLS)
@pytest.mark.slow
def test_runs_end_with_the_same_rows_and_weights_whatever_is_killed_and_whatever_the_clocks_show(
    tmp_path: Path, start_launch: StartLaunch, set_clock: SetClock, chance: random.Random
) -> None:
    undisturbed, experiment = (sweep(tmp_path / name, *CHANGES) for name in ("undisturbed", "storm"))
    train_all(undisturbed.folder)
    kills, began = 0, time.monotonic()
    with stepping(set_clock, random.Random(chance.random())):
        launched = start_launch(experiment.folder)
        while any(run.status().state != State.COMPLETED for run in experiment.runs):
            if launched.process.poll() is not None:
                launched = start_launch(experiment.folder)
            wait_for_a_moment(experiment, launched, chance)
            if kills < KILLS:
                running = [run for run in experiment.runs if run.status().state == State.RUNNING]
                processes = [process for run in running for process in processes_of(run)]
                killers = [
                    partial(send_signal, process, signal.SIGKILL)
                    for process in processes
                    if not is_gone(process)
                ]
                if launched.process.poll() is None:
                    killers.append(launched.process.kill)
                if killers:
                    chance.choice(killers)()
                    kills += 1
        assert start_launch(experiment.folder).finish(seconds=250) == 0
    for run, same in zip(experiment.runs, undisturbed.runs, strict=True):
        check_same(run, same, kinds=("step", "eval", "segment", "end"))
        check_checkpoints(run)
        assert all(hours_off(run)), "no clock was set"
    for shown in json.loads(succeeded("status", experiment.folder, "--json").output):
        assert 0 < shown["seconds"] < time.monotonic() - began
        assert 0 < shown["core_hours"] < 2 * (time.monotonic() - began) / HOUR
