"""Runs that are killed or told to end, launched again: they end with the same rows and the same weights."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.command_line import ASYNCPP, succeeded
from support.launches import StartLaunch, check_same, processes_of, rows_of, started_process, sweep, wait_for

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import RankEnd
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import is_gone
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from stages.liveness.stop_signal import RESUMABLE

STEPS = 150
ONE_RUN = ["matrix={schedule: 2bw, optimizer: muon}", "exclude=[]", "error_feedback=true", "seed=3"]
OFTEN = ["train.eval_interval=50", "train.checkpoint_interval=20", "site.timeout=20"]


def steps_written(run: Run) -> int:
    try:
        return run.metrics_file.read_text().count('"kind": "step"')
    except FileNotFoundError:
        return 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run as it is without a kill, in one process."""
    (run,) = one_run(tmp_path_factory.mktemp("undisturbed") / "e").runs
    succeeded("train", run.folder, "--replay")
    return run


def one_run(folder: Path, *changes: str) -> Experiment:
    return sweep(folder, *ONE_RUN, f"train.steps={STEPS}", *OFTEN, *changes)


@pytest.mark.slow
def test_ctrl_c_and_a_signal_to_one_rank_save_first(tmp_path: Path, start_launch: StartLaunch) -> None:
    """Of a model in shards; of a pipeline, where a job is preempted (tests/cluster)."""
    # A norm of shards is rounded otherwise than one of whole matrices.
    changes = ["matrix.schedule=fsdp", "error_feedback=false", "train.clip=none"]
    experiment = one_run(tmp_path / "e", *changes)
    (run,) = experiment.runs
    launched = start_launch(experiment.folder, "--max-parallel", "3")
    wait_for(lambda: steps_written(run) >= 5, seconds=250)
    processes = processes_of(run)
    launched.ctrl_c()
    assert launched.finish(seconds=250) == 130, launched.errors
    assert f"To resume: asyncpp launch {experiment.folder} --max-parallel 3\n" in launched.errors
    wait_for(lambda: all(is_gone(process) for process in processes), seconds=250)
    first = run.saved_step
    assert first is not None
    assert (run.status().state, run.status().reason) == (State.INTERRUPTED, "Ctrl-C in asyncpp launch")
    assert run.status().step == first == rows_of(run, "step")[-1]["step"]

    launched = start_launch(experiment.folder)
    wait_for(lambda: steps_written(run) >= first + 3, seconds=250)
    os.kill(run.status().pids[0], signal.SIGUSR2)
    assert launched.finish(seconds=250) == 1, launched.errors
    second = run.saved_step
    assert second is not None
    assert second > first
    assert run.status().state == State.INTERRUPTED
    assert "SIGUSR2" in run.status().reason
    ends = [Attempt(run, 2).read(RankEnd, rank) for rank in (0, 1)]
    assert [end and end.code for end in ends] == [RESUMABLE, RESUMABLE]

    launched = start_launch(experiment.folder)
    assert launched.finish(seconds=250) == 0, launched.errors
    (undisturbed,) = one_run(tmp_path / "undisturbed", *changes).runs
    succeeded("train", undisturbed.folder, "--replay")
    # Where it was told to end a segment was cut in two, which changes no numbers.
    check_same(run, undisturbed)


@pytest.mark.slow
def test_train_alone_exits_with_75_and_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, undisturbed: Run
) -> None:
    (run,) = one_run(tmp_path / "e").runs
    command = [*ASYNCPP, "train", str(run.folder), "--replay"]
    with started_process(command, stderr=subprocess.PIPE, text=True) as training:
        try:
            wait_for(lambda: steps_written(run) >= 45, seconds=250)
        finally:
            training.terminate()
        _, errors = training.communicate(timeout=40)
    assert training.returncode == RESUMABLE, errors
    assert f"saved after step {run.saved_step}" in errors
    assert run.status().state == State.INTERRUPTED

    newest = run.checkpoints / f"step-{run.saved_step}" / "rank-0.safetensors"
    newest.write_bytes(newest.read_bytes()[:1000])
    done = succeeded("train", run.folder, "--replay")
    assert "is not used: rank-0.safetensors has 1000 bytes instead of" in done.errors
    check_same(run, undisturbed, kinds=("step", "eval", "segment", "end"))
