"""A run that hangs names the rank that all others wait for."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import asyncpp
from support.launches import HOURS, Launched, is_training, sweep, wait_for

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.processes import is_gone, send_signal
from stages.comm.flight_recorder import set_flight_recorder
from stages.liveness.waiting import awaited_rank


@pytest.mark.parametrize(
    ("waits_for", "awaited"),
    [
        ({0: 1, 2: 1, 3: 2}, 1),
        ({3: 2}, 2),
        ({0: 1, 1: 0}, None),  # a deadlock
        ({0: 1, 3: 2}, None),
        ({}, None),
    ],
)
def test_the_awaited_rank_is_where_all_chains_end(waits_for: dict[int, int], awaited: int | None) -> None:
    assert awaited_rank(waits_for) == awaited


def test_the_flight_recorder_is_on_and_a_users_settings_stay(tmp_path: Path) -> None:
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    set_flight_recorder(environment, folder=tmp_path)
    assert environment == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "nccl-"),
    }


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[list[Launched]]:
    """Launches, which do not outlive the test."""
    made: list[Launched] = []
    yield made
    for launched in made:
        launched.process.kill()
        launched.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_rank_is_named(tmp_path: Path, launches: list[Launched]) -> None:
    experiment = sweep(
        tmp_path / "e",
        "matrix={schedule: 2bw, optimizer: adamw}",
        "exclude=[]",
        f"train.steps={HOURS}",
        "parallel.stages=3",
        "schedule.microbatches=4",
        "model.layers=3",
        "site.timeout=16",
        "site.grace=1",
    )
    (run,) = experiment.runs
    launched = Launched(experiment.folder, ["--max-parallel", "1"], output=tmp_path / "launch")
    launches.append(launched)
    wait_for(lambda: is_training(run) or launched.process.poll() is not None, seconds=300)
    assert launched.process.poll() is None, launched.errors
    attempt = Attempt(run, run.status().attempt)
    trainer = attempt.processes(1)[0]
    os.kill(trainer.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: attempt.awaited() != "", seconds=300)
        launched.finish(seconds=300)
    finally:
        send_signal(trainer, signal.SIGKILL)
    assert is_gone(trainer)
    (status,) = json.loads(asyncpp("status", experiment.folder, "--json").output)
    named = re.compile(
        r"all wait for rank 1: rank (0 waits for (B\d+ of stage 1 from rank 1|rank 1 to receive activations)"
        r"|2 waits for (F\d+ of stage 1 from rank 1|rank 1 to receive a gradient))"
    )
    assert status["state"] == "failed"
    assert named.match(status["reason"]), status["reason"]
    assert named.search(asyncpp("logs", run.folder).errors)
