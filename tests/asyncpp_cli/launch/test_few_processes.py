"""`launch` where no more processes can be started: its runs go on later, and no traceback is seen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.privileges import NOBODY, permitted
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.launch.local_machine import Launcher, Task
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.files import Outcome
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.sites.resources import Machine, Resources
from stages.config import SiteConfig

ANOTHER = NOBODY.replace("54321", "54322")
"""A user whose processes nobody else's tests count."""

ONE = Resources(ranks=2, processes=1, threads=1, gpus=0)


class Unseen:
    """Progress that nobody looks at."""

    def update(self, statuses: Sequence[tuple[Run, Status]]) -> None:
        """As the launcher calls it."""


def runs_without_text(folder: Path, number: int) -> list[Run]:
    """Runs that end as soon as they begin."""
    experiment = ExperimentFolder(folder)
    runs = [
        experiment.add(settings("1f1b", "adamw", seed=seed), status=Status(state=State.PENDING))
        for seed in range(number)
    ]
    for run in runs:
        text = run.config_file.read_text()
        run.config_file.write_text(text.replace("path: null", "path: /no/such/text"))
    return runs


def launched(runs: Sequence[Run]) -> list[Status]:
    tasks = [Task(run, ONE, steps=4, site=SiteConfig(grace=1.0)) for run in runs]
    machine = Machine(cores=2, gpus=())
    return Launcher(tasks, machine=machine, max_parallel=2, replay=True, progress=Unseen()).run()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_no_process_can_be_started_in_the_middle_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = runs_without_text(tmp_path / "e", 2)
    start, started = subprocess.Popen.__init__, []

    def short(process: Any, command: Any, *arguments: Any, **options: Any) -> None:
        if "asyncpp_cli.launch.supervisor" in command:
            started.append(command)
            if len(started) == 2:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        start(process, command, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", short)
    statuses = launched(runs)
    # As soon as the first has ended there is room for the second.
    assert len(started) == 3
    assert [status.attempt for status in statuses] == [1, 2]
    assert all("/no/such/text" in status.reason for status in statuses), statuses
    [line] = [line for line in capfd.readouterr().err.splitlines() if "could not be started" in line]
    assert "run-1 could not be started: a process cannot be started (Resource temporarily" in line
    outcome = Attempt(runs[1], 1).read(Outcome)
    assert outcome is not None
    assert outcome.state == State.INTERRUPTED
    assert "could not be started" in outcome.reason


@pytest.mark.timeout(300)
def test_no_process_can_be_started_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = runs_without_text(tmp_path / "e", 3)

    def short(process: Any, command: Any, *arguments: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "__init__", short)
        first, *others = launched(runs)
    assert (first.state, first.cause) == (State.INTERRUPTED, Cause.ERROR)
    assert "could not be started" in first.reason
    assert {status.state for status in others} == {State.PENDING}
    # The next launch takes it.
    attempt = claim(runs[0], processes=1, replay=True, steps=4)
    assert attempt is not None
    assert attempt.number == 2


SCRIPT = """
import sys, time
from pathlib import Path
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.launch.local_machine import LocalJobs
from asyncpp_cli.sites.resources import Resources
from asyncpp_cli.runs.run_folder import Run

run, site = Run(Path(sys.argv[1])), LocalJobs()
attempt = claim(run, processes=1, replay=True, steps=4)
site.start(attempt, resources=Resources(ranks=2, processes=1, threads=1, gpus=0), devices=())
while not site.has_ended(attempt):
    time.sleep(0.05)
print(current_status(run, none_to_come=attempt.number).reason)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(not permitted(f"{ANOTHER} true"), reason="no other user is permitted here")
@pytest.mark.slow
def test_the_process_that_starts_the_ranks_can_start_none() -> None:
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o777)
        [run] = runs_without_text(Path(outer) / "e", 1)
        for path in Path(outer).rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o666)
        # Two: the one that launches, and the supervisor that starts the ranks.
        done = subprocess.run(
            [*ANOTHER.split(), "prlimit", "--nproc=2", sys.executable, "-c", SCRIPT, run.folder],
            env=dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", HOME=outer),
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.stderr == ""
    assert "rank 0: BlockingIOError" in done.stdout
    assert "Resource temporarily unavailable" in done.stdout
