"""`asyncpp cancel` of a run that another starter began: no supervisor listens, its ranks see the request."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.command_line import asyncpp
from support.launches import HOURS, ONE, is_training, started_process, sweep, wait_for

from asyncpp_cli.runs.status import Cause, State


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_ranks_of_torchrun_save_when_their_run_is_cancelled_and_are_not_started_again(tmp_path: Path) -> None:
    steps = [f"train.steps={HOURS}", "train.checkpoint_interval=0"]
    experiment = sweep(tmp_path / "e", *ONE, *steps)
    [run] = experiment.runs
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    command = [sys.executable, *torchrun, "-m", "asyncpp_cli", "train", str(run.folder)]
    with (tmp_path / "errors").open("wb") as errors, started_process(command, stderr=errors) as started:
        try:
            wait_for(lambda: is_training(run), seconds=200)
            assert asyncpp("cancel", experiment.folder).code == 0
            assert started.wait(100) == 0, (tmp_path / "errors").read_text()
        finally:
            started.terminate()
    status = run.status()
    assert (status.state, status.cause, status.attempt) == (State.INTERRUPTED, Cause.CANCELLED, 1)
    assert run.saved_step == status.step > 0
