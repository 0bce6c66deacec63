"""Machines that share one folder; each is a namespace with a host name of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from support.command_line import ASYNCPP
from support.launches import LONG, check_same, runs_attempt, sweep, wait_for

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State

LEASE = "site.lease=20"
APART = ["unshare", "--uts", "--pid", "--fork", "--kill-child"]
OWN_PROC = ["--mount-proc"]
"""Without it /proc shows the processes of the namespace outside."""

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="a second host name needs root and unshare(1)",
    ),
]


class Machine:
    """A command on a machine of its own."""

    def __init__(self, name: str, *command: str, output: Path, options: list[str]) -> None:
        self.output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [*APART, *options, "sh", "-c", 'hostname "$0" && exec "$@"', name, *command],
                stdout=file,
                stderr=file,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        [first] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        namespace = Path(f"/proc/{first}/ns/pid").readlink()
        for folder in Path("/proc").glob("[0-9]*"):
            if namespace_of(folder) == namespace:
                os.kill(int(folder.name), number)

    def vanish(self) -> None:
        self.process.kill()
        self.process.wait(timeout=250)


@contextmanager
def slowed(machine: Machine) -> Iterator[None]:
    """It works a tenth of the time, so that its run does not end before another machine has looked at it."""
    over = Event()

    def alternate() -> None:
        while not over.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
                machine.signal(number)
                over.wait(seconds)

    slowing = Thread(target=alternate)
    slowing.start()
    try:
        yield
    finally:
        over.set()
        slowing.join()


def namespace_of(folder: Path) -> Path | None:
    try:
        return (folder / "ns" / "pid").readlink()
    except OSError:
        return None


Start = Callable[..., Machine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command on a new machine. Nothing of it outlives the test."""
    machines: list[Machine] = []

    def begin(*command: str, options: list[str] = OWN_PROC) -> Machine:
        name = f"machine-{len(machines)}"
        machines.append(Machine(name, *command, output=tmp_path / name, options=options))
        return machines[-1]

    yield begin
    for machine in machines:
        machine.vanish()


def test_three_machines_share_runs_and_one_that_vanishes_gives_its_own_back(
    start: Start, tmp_path: Path
) -> None:
    matrix = f"matrix={{schedule: 1f1b, optimizer: adamw, seed: {list(range(4))}}}"
    runs = sweep(tmp_path / "e", matrix, "exclude=[]", "train.steps=20", "site.device=cpu", LEASE).runs
    assert len(runs) == 4
    launch = [*ASYNCPP, "launch", str(tmp_path / "e"), "--replay", "--max-parallel", "1"]
    machines = [start(*launch) for _ in range(3)]
    wait_for(lambda: bool(running(runs, "machine-0")), seconds=250)
    machines[0].vanish()
    lost = running(runs, "machine-0")
    assert [machine.process.wait(timeout=1000) for machine in machines[1:]] == [0, 0]
    for run in runs:
        assert run.status().state == State.COMPLETED, [machine.output.read_text() for machine in machines]
        assert run.status().attempt == (2 if run.id in lost else 1)


def running(runs: tuple[Run, ...], host: str) -> set[str]:
    """Ids of the runs that a machine is running, by their files."""
    statuses = {run.id: run.status() for run in runs}
    return {
        run_id for run_id, status in statuses.items() if (status.state, status.host) == (State.RUNNING, host)
    }


def long_run(folder: Path) -> Run:
    [run] = sweep(folder / "disturbed", *LONG, LEASE).runs
    return run


def check_resumed(disturbed: Run, undisturbed: Run) -> None:
    status = disturbed.status()
    assert (status.state, status.attempt) == (State.COMPLETED, 2), status.reason
    check_same(disturbed, undisturbed)


@pytest.mark.parametrize("options", [OWN_PROC, []], ids=["own /proc", "the /proc outside"])
def test_a_frozen_machine_loses_its_run_and_ends_it_when_it_goes_on(
    options: list[str], start: Start, tmp_path: Path, undisturbed: Run
) -> None:
    disturbed = long_run(tmp_path)
    launch = [*ASYNCPP, "launch", str(tmp_path / "disturbed"), "--replay", "--max-parallel", "1"]
    frozen = start(*launch, options=options)
    wait_for(lambda: runs_attempt(disturbed, 1), seconds=250)
    frozen.signal(signal.SIGSTOP)
    assert runs_attempt(disturbed, 1)
    other = start(*launch, options=options)
    wait_for(lambda: runs_attempt(disturbed, 2), seconds=500)
    frozen.signal(signal.SIGCONT)
    assert other.process.wait(timeout=1000) == 0, other.output.read_text()
    assert frozen.process.wait(timeout=250) == 0, frozen.output.read_text()
    check_resumed(disturbed, undisturbed)
    told = [line for line in frozen.output.read_text().splitlines() if "silent" in line]
    assert len(told) == 1, frozen.output.read_text()
    assert "attempt 2 on machine-1 has taken it over" in told[0]
    assert "attempt 2 has begun, and this one ends" in Attempt(disturbed, 1).startup_log.read_text()


def test_a_pod_that_comes_back_in_a_new_namespace_waits_for_its_own_lease(
    start: Start, tmp_path: Path, undisturbed: Run
) -> None:
    disturbed = long_run(tmp_path)
    train = [*ASYNCPP, "train", str(disturbed.folder), "--replay"]
    pod = start(*train)
    wait_for(lambda: runs_attempt(disturbed, 1), seconds=250)
    # While it lives nobody else trains the run.
    with slowed(pod):
        second = start(*train)
        assert second.process.wait(timeout=250) == 2
    assert "is being run on machine-0 (attempt 1)" in second.output.read_text()
    assert runs_attempt(disturbed, 1)
    pod.vanish()
    again = start(*train)
    assert again.process.wait(timeout=1000) == 0, again.output.read_text()
    check_resumed(disturbed, undisturbed)


def test_a_frozen_pod_ends_with_one_line_when_it_goes_on(
    start: Start, tmp_path: Path, undisturbed: Run
) -> None:
    disturbed = long_run(tmp_path)
    train = [*ASYNCPP, "train", str(disturbed.folder), "--replay"]
    frozen = start(*train)
    wait_for(lambda: runs_attempt(disturbed, 1), seconds=250)
    frozen.signal(signal.SIGSTOP)
    other = start(*train)
    wait_for(lambda: runs_attempt(disturbed, 2), seconds=500)
    frozen.signal(signal.SIGCONT)
    assert frozen.process.wait(timeout=250) == 1
    told = [line for line in frozen.output.read_text().splitlines() if "asyncpp:" in line]
    assert len(told) == 1, frozen.output.read_text()
    assert "attempt 1 was given up" in told[0]
    assert other.process.wait(timeout=1000) == 0, other.output.read_text()
    check_resumed(disturbed, undisturbed)
