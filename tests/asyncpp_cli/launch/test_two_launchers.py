"""Two launchers on the same runs: neither takes the other's attempt for its own."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.command_line import ASYNCPP, asyncpp
from support.launches import ONE, TINY, started_process, sweep, wait_for

from asyncpp_cli.launch.local_machine import Launcher, tasks_of
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.settle import Knowledge, settle
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.sites.resources import this_machine


class AnotherLauncher:
    """A launcher's display, which claims the run when it has paused, before the launcher looks again."""

    launcher: Launcher

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.seen: list[tuple[int, State, str]] = []

    def update(self, statuses: Sequence[tuple[Run, Status]]) -> None:
        [(run, status)] = statuses
        self.seen.append((status.attempt, status.state, status.reason))
        if self.attempt is None and status.state == State.RUNNING:
            wait_for(lambda: settle(run).state == State.PAUSED, seconds=250)
            self.launcher._jobs.finish(seconds=250)
            self.attempt = claim(run, processes=1, replay=True, steps=4)
        elif self.attempt is not None:
            # It has been seen once: end it, and with it the launch.
            settle(run, Knowledge(all_over=self.attempt.number))


@pytest.mark.slow
def test_the_attempt_of_another_launcher_is_not_ended_with_the_own_one(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *ONE, "train.steps=4")
    [run] = experiment.runs
    machine = this_machine()
    tasks, _ = tasks_of([run], replay=True, machine=machine, pauses={run.id: 2})
    other = AnotherLauncher()
    other.launcher = Launcher(tasks, machine=machine, max_parallel=None, replay=True, progress=other.update)
    other.launcher.run()
    assert other.attempt is not None
    assert next(seen for seen in other.seen if seen[0] == 2) == (2, State.RUNNING, "")


def test_a_launch_that_only_watched_says_that_it_ended_nothing(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *ONE, "train.steps=4")
    [run] = experiment.runs
    other = claim(run, processes=1, replay=True, steps=4)
    assert other is not None
    before = signal.getsignal(signal.SIGINT)

    def press_ctrl_c() -> None:
        wait_for(lambda: signal.getsignal(signal.SIGINT) is not before, seconds=250)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press_ctrl_c)
    pressing.start()
    ended = asyncpp("launch", experiment.folder, "--replay")
    pressing.join()
    assert (ended.code, run.status().state) == (130, State.RUNNING)
    cancel = f"asyncpp cancel {experiment.folder}"
    for said in ("Ctrl-C: no run of this launch was training.", f"go on (1); to end them: {cancel}"):
        assert said in ended.errors
    settle(run, Knowledge(all_over=other.number))


@pytest.mark.slow
def test_a_tune_that_stood_still_leaves_the_next_rung_to_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    command = [*ASYNCPP, "tune", "quickstart", *TINY, "train.steps=4"]
    command += [*ONE, "--over", "optimizer.lr=[1e-3,2e-3]", "--rungs", "0.5", "--max-parallel", "2"]
    command += ["--replay", "--out", str(folder)]
    with (tmp_path / "errors").open("w+") as errors, ExitStack() as processes:

        def started() -> subprocess.Popen[bytes]:
            return processes.enter_context(started_process(command, stdout=errors, stderr=errors))

        first = started()
        try:
            wait_for(lambda: (folder / "tune.json").exists(), seconds=250)
            runs = open_experiment(folder).runs
            wait_for(lambda: all(Attempt(run, 1).processes(0) for run in runs), seconds=250)
            first.send_signal(signal.SIGSTOP)
            second = started()
            wait_for(lambda: any(run.status().attempt == 2 for run in runs), seconds=250)
        finally:
            first.send_signal(signal.SIGCONT)
        codes = [process.wait(timeout=250) for process in (first, second)]
        errors.seek(0)
        assert codes == [0, 0], errors.read()
    assert {run.status().state for run in runs} == {State.PAUSED, State.COMPLETED}
