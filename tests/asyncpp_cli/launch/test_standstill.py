"""Nobody waits without end: for a supervisor that is stopped, for a rank whose run's folder is gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.launch import local_machine as launcher
from asyncpp_cli.launch.local_machine import Launcher, SuspendedProcesses, Task
from asyncpp_cli.launch.supervisor import Supervisor
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.processes import is_suspended, process_id, send_signal, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.sites.resources import Machine, Resources
from stages.config import SiteConfig
from stages.liveness.stop_signal import SIGNALS

WAITS = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_DFL); print(flush=True); input()"


def waiting() -> subprocess.Popen[bytes]:
    """A process that waits for its standard input."""
    child = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def stop(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes, which do not outlive the test."""
    made = [waiting(), waiting()]
    yield made
    for child in made:
        with child:
            child.kill()


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Of one process, just claimed."""
    run = ExperimentFolder(tmp_path / "e").add(settings("1f1b", "adamw"), status=Status(state=State.PENDING))
    claimed = claim(run, processes=1, replay=True, steps=4)
    assert claimed is not None
    return claimed


@pytest.fixture
def signals() -> Iterator[None]:
    """What a supervisor does with signals is forgotten after it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("signals")
def test_a_rank_ends_whose_run_is_deleted(attempt: Attempt, children: list[subprocess.Popen[bytes]]) -> None:
    child = children[0]
    attempt.record_start(0, process_id(child.pid), this_process())
    supervisor = Supervisor(attempt, {0: child}, size=1, grace=1e3, received=[])
    shutil.rmtree(attempt.run.folder)
    assert not supervisor.watch()
    assert child.returncode == -signal.SIGTERM
    assert not attempt.run.folder.exists()


class Unseen:
    """Progress that nobody looks at."""

    def update(self, statuses: Sequence[tuple[Run, Status]]) -> None:
        """As the launcher calls it."""


@pytest.mark.timeout(120)
def test_a_stopped_supervisor_does_not_keep_a_launch_waiting(
    attempt: Attempt, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_SECONDS_BETWEEN_CHECKS", 0.0)
    monkeypatch.setattr(launcher, "_SECONDS_AFTER_TRAINING", 0.0)
    trains, supervises = children
    processes = process_id(trains.pid), process_id(supervises.pid)
    attempt.record_start(0, *processes)
    stop(supervises)
    trains.kill()
    trains.wait()
    # It is told to end already; that only reaches it once it goes on.
    supervises.terminate()
    task = Task(attempt.run, Resources(1, 1, 1, 0), steps=4, site=SiteConfig(grace=1.0))
    machine = Machine(cores=1, gpus=())
    [status] = Launcher([task], machine=machine, max_parallel=None, replay=True, progress=Unseen()).run()
    assert status.state == State.FAILED
    assert "rank 0 vanished" in status.reason
    assert supervises.wait() == -signal.SIGTERM


def test_stopped_processes_are_resumed_once_their_run_is_stalled(
    attempt: Attempt,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher, "_SECONDS_BETWEEN_CHECKS", 0.0)
    trains, supervises = (process_id(child.pid) for child in children)
    attempt.record_start(0, trains, supervises)
    for child in children:
        stop(child)
    watch, status = SuspendedProcesses(), attempt.run.status()
    for _ in range(3):
        # A person may have stopped both, and the run is not silent for long yet.
        watch.check(attempt.run, status, silence=1e6)
    assert is_suspended(trains)
    assert is_suspended(supervises)
    assert capfd.readouterr().err.count("is stopped (SIGSTOP)") == 2
    watch.check(attempt.run, status, silence=-1.0)
    for number, child in enumerate(children):
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert not is_suspended((trains, supervises)[number])
    # Whoever is stopped again and again is ended.
    for _ in range(2 * launcher._MAX_RESUMES + 2):
        if children[1].poll() is not None:
            break
        os.kill(children[1].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, children[1].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        watch.check(attempt.run, status, silence=-1.0)
        watch.check(attempt.run, status, silence=-1.0)
    assert children[1].wait(60) == -signal.SIGKILL
    send_signal(trains, signal.SIGKILL)
