"""Ending runs of this machine on purpose, and choosing those to start again. On a cluster: tests/cluster."""

from __future__ import annotations

import sys
from collections.abc import Container
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.launches import (
    HOURS,
    ONE,
    StartLaunch,
    is_training,
    launch_in_this_process,
    started_process,
    sweep,
    unseen,
    wait_for,
)

from asyncpp_cli.launch.cancel import Cancellations, record_cancellation
from asyncpp_cli.launch.local_machine import Launcher, tasks_of
from asyncpp_cli.launch.start import runs_to_retry
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.sites.resources import this_machine


@pytest.mark.slow
def test_a_launch_that_is_open_starts_nothing_that_was_cancelled(
    tmp_path: Path, start_launch: StartLaunch
) -> None:
    experiment = sweep(tmp_path / "e", *ONE, "matrix.seed=[0,1,2]", f"train.steps={HOURS}")
    first, *others = experiment.runs
    launched = start_launch(tmp_path / "e", "--max-parallel", "1", "--replay")
    wait_for(lambda: is_training(first), seconds=250)
    ended = asyncpp("cancel", tmp_path / "e")
    assert (ended.code, ended.errors) == (0, "Cancelled: 0 queued, 1 running.\n")
    status = first.status()
    assert (status.state, status.cause) == (State.INTERRUPTED, Cause.CANCELLED)
    assert status.reason.startswith("cancelled by ")
    assert first.saved_step == status.step > 0
    assert launched.finish(seconds=250) == 1
    assert "0 of 3 runs completed" in launched.errors
    assert "; 2 were cancelled before they began" in launched.errors
    assert [run.status().attempt for run in experiment.runs] == [1, 0, 0]
    # The next launch is another matter; and one that looked just before it was said gives the run back.
    later = Cancellations(experiment)
    assert others[0].id not in later
    assert launch_with(experiment, cancelled=_AfterOneLook(others[0].id)) == State.INTERRUPTED
    assert others[0].status().cause == Cause.CANCELLED
    assert not list(others[0].logs.iterdir())


def test_a_torn_line_cancels_nothing_and_leaves_the_next_one_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = Experiment(folder=tmp_path, name="e", template="", cells=())
    cancelled = Cancellations(experiment)
    (tmp_path / "cancelled.jsonl").write_text('{"time": 1.0, "by": "anna", "ru')
    record_cancellation(experiment, {"a", "b"})
    assert "a" in cancelled
    said = capsys.readouterr().err
    assert "a line of" in said
    assert "is not JSON" in said
    assert "cancelled 2 runs: this launch does not start them" in said
    record_cancellation(experiment, {"b"}, withdrawn=True)
    assert ["a" in cancelled, "b" in cancelled] == [True, False]
    assert "cancelling failed for" in capsys.readouterr().err


class _AfterOneLook:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._looks = 0

    def __contains__(self, run_id: object) -> bool:
        self._looks += 1
        return run_id == self._run_id and self._looks > 2


def launch_with(experiment: Experiment, *, cancelled: Container[str]) -> State:
    """Launch the second run alone. How it ended."""
    machine = this_machine()
    tasks, _ = tasks_of(experiment.runs[1:2], replay=True, machine=machine)
    [status] = Launcher(
        tasks, machine=machine, max_parallel=1, replay=True, progress=unseen, cancelled=cancelled
    ).run()
    return status.state


@pytest.mark.slow
def test_runs_to_retry_are_chosen_by_what_ended_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_in_this_process(monkeypatch)
    folder = tmp_path / "e"
    experiment = sweep(folder, *ONE, "matrix.seed=[0,1,2,3,4,5]", "train.steps=2")
    killed, memory, limit, cancelled, completed, fresh = (run.id for run in experiment.runs)
    for run_id, state, cause in (
        (killed, State.FAILED, Cause.KILLED),
        (memory, State.FAILED, Cause.OUT_OF_MEMORY),
        (limit, State.INTERRUPTED, Cause.TIME_LIMIT),
        (cancelled, State.INTERRUPTED, Cause.CANCELLED),
    ):
        experiment.run(run_id).write_status(Status(state=state, cause=cause, attempt=1))
    succeeded("train", experiment.run(completed).folder, "--replay")

    def chosen(**which: bool) -> set[str]:
        wanted = {"failed": False, "timeout": False, "oom": False} | which
        named = {completed, fresh} if which.get("named") else set()
        wanted.pop("named", None)
        return set(runs_to_retry(experiment, named=named, **wanted))

    assert chosen(failed=True) == {killed, memory}
    assert chosen(oom=True) == {memory}
    assert chosen(timeout=True) == {limit}
    assert chosen(timeout=True, oom=True) == {limit, memory}
    assert chosen(named=True) == {fresh}

    again = asyncpp("launch", folder / completed[:-2])
    assert (again.code, again.errors) == (0, f"{completed} is completed: nothing is left to train\n")
    experiment.run(memory).write_status(Status(state=State.INTERRUPTED, attempt=1))
    none = asyncpp("launch", folder, "--oom").errors
    assert none == f"None of the 6 runs ran out of memory: asyncpp status {folder}\n"
    ended = Status(state=State.FAILED, cause=Cause.OUT_OF_MEMORY, attempt=1)
    experiment.run(memory).write_status(ended)
    assert "6 runs begin with it" in refusal("launch", folder, "2bw-adamw")
    assert "no such run" in asyncpp("cancel", folder, "nothing").errors
    succeeded("launch", folder, "--oom", "--replay")
    after = {run.id: run.status() for run in open_experiment(folder).runs}
    assert (after[memory].state, after[memory].attempt) == (State.COMPLETED, 2)
    assert {run_id: status.attempt for run_id, status in after.items() if run_id != memory} == {
        **dict.fromkeys((killed, limit, cancelled, completed), 1),
        fresh: 0,
    }


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
