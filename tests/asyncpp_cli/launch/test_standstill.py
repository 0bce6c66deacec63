"""Nobody waits without end: for a supervisor that is stopped, for a rank whose run's folder is gone."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.attempts import claimed
from support.command_line import asyncpp, ran
from support.launches import HOURS, ONE, StartLaunch, is_training, started_process, sweep, unseen, wait_for
from support.privileges import NOBODY, permitted
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.launch.common.supervisor import Supervisor
from asyncpp_cli.launch.local_machine import Launcher, Task
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Outcome
from asyncpp_cli.runs.processes import is_gone, process_id, send_signal, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.sites.resources import Machine, Resources
from stages.config.run_config import RunConfig, SiteConfig, TrainConfig
from stages.liveness.watchdog import awaited_rank, set_flight_recorder

WAITS = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_DFL); print(flush=True); input()"


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Of one process, just claimed."""
    run = ExperimentFolder(tmp_path / "e").add(settings("1f1b", "adamw"), status=Status(state=State.PENDING))
    return claimed(run, processes=1, replay=True, steps=4)


def test_a_rank_ends_whose_run_is_deleted(attempt: Attempt) -> None:
    command = [sys.executable, "-c", WAITS]
    with started_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        attempt.record_start(0, process_id(child.pid), this_process())
        supervisor = Supervisor(attempt, {0: child}, size=1, grace=1e3, lease=60.0, received=[])
        shutil.rmtree(attempt.run.folder)
        assert not supervisor.watch()
    assert child.returncode == -signal.SIGTERM
    assert not attempt.run.folder.exists()


ANOTHER = NOBODY.replace("54321", "54322")
"""A user whose processes nobody else's tests count."""

PROCESS = Resources(ranks=2, processes=1, threads=1, gpus=0)


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
    config = RunConfig(train=TrainConfig(steps=4), site=SiteConfig(grace=1.0))
    tasks = [Task(run, PROCESS, config) for run in runs]
    machine = Machine(cores=2, gpus=())
    return Launcher(tasks, machine=machine, max_parallel=2, replay=True, progress=unseen).run()


@pytest.mark.slow
def test_no_process_can_be_started_in_the_middle_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = runs_without_text(tmp_path / "e", 2)
    start, started = subprocess.Popen.__init__, []

    def short(process: Any, command: Any, *arguments: Any, **options: Any) -> None:
        if "asyncpp_cli.launch.common.supervisor" in command:
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
    assert claimed(runs[0], processes=1, replay=True, steps=4).number == 2


SCRIPT = """
import sys, time
from pathlib import Path
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.launch.local_machine import LocalJobs
from asyncpp_cli.sites.resources import Resources
from asyncpp_cli.runs.run_folder import Run

run, site = Run(Path(sys.argv[1])), LocalJobs()
attempt = claim(run, processes=1, replay=True, steps=4)
site.start(attempt, resources=Resources(ranks=2, processes=1, threads=1, gpus=0), devices=())
while site.ended_with(attempt) is None:
    time.sleep(0.05)
print(current_status(run, none_to_come=attempt.number).reason)
"""


@pytest.mark.skipif(not permitted(f"{ANOTHER} true"), reason="no other user is permitted here")
@pytest.mark.slow
def test_the_process_that_starts_the_ranks_can_start_none() -> None:
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o777)
        [run] = runs_without_text(Path(outer) / "e", 1)
        for path in Path(outer).rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o666)
        # Two: the one that launches, and the supervisor that starts the ranks.
        few = [*ANOTHER.split(), "prlimit", "--nproc=2"]
        own = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", HOME=outer)
        done = ran(*few, sys.executable, "-c", SCRIPT, run.folder, env=own)
    assert done.errors == ""
    # By the exception's name, or since Python 3.12 with the program's.
    assert re.match(r"rank 0: (BlockingIOError|.*python.*): .*Resource temporarily unavailable", done.output)


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


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path: Path, start_launch: StartLaunch) -> None:
    changes = [*ONE, f"train.steps={HOURS}"]
    changes += ["parallel.stages=3", "schedule.microbatches=4", "model.layers=3"]
    changes += ["site.timeout=12", "site.grace=1"]
    experiment = sweep(tmp_path / "e", *changes)
    (run,) = experiment.runs
    launched = start_launch(experiment.folder, "--max-parallel", "1")
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
