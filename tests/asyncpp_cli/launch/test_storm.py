"""Launches of many runs, of which launchers, supervisors and ranks are killed while all clocks step."""

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
    SetClock,
    StartLaunch,
    hours_off,
    processes_of,
    rows_of,
    stepping,
    sweep,
    train_all,
)

from asyncpp_cli.runs.processes import is_gone, send_signal
from asyncpp_cli.runs.status import State

KILLS = int(os.environ.get("ASYNCPP_TEST_KILLS", "6"))
SEEDS = -(-KILLS // 10)
"""Of four runs each: 38 kills are a storm over 16 runs."""
CHANGES = [
    f"matrix={{schedule: [1f1b, 2bw], optimizer: [muon, adamw], seed: {list(range(SEEDS))}}}",
    *("exclude=[]", "train.steps=150", "train.eval_interval=50", "train.checkpoint_interval=20"),
]


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
            time.sleep(chance.uniform(0.0, 8.0))
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
        for kind in ("step", "eval", "segment", "end"):
            assert rows_of(run, kind) == rows_of(same, kind), (run.id, kind)
        assert all(hours_off(run)), "no clock was set"
    for shown in json.loads(succeeded("status", experiment.folder, "--json").output):
        assert 0 < shown["seconds"] < time.monotonic() - began
        assert 0 < shown["core_hours"] < 2 * (time.monotonic() - began) / HOUR
