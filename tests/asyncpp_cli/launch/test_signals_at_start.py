"""Signals that come before a process listens: being told to end, and no failure of the run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.attempts import claimed
from support.command_line import ran
from support.launches import dying

from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.launch.job.job_end import JobEnd, corrected_outcome, signal_of
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.sbatch import BatchJob
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.settle import Knowledge, end_rank, settle
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State
from asyncpp_cli.sites.profile import find_site
from asyncpp_cli.slurm.client import JobPhase
from stages.liveness.stop_signal import RESUMABLE

CONFIG = """
schedule: {name: 2bw}
optimizer: {name: adamw}
model: {name: tiny, layers: 2, width: 8, heads: 1, kv_heads: 1, mlp_width: 8}
train: {steps: 5}
"""
GONE = replace(this_process(), pid=2**22 + 1, start=1)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return claimed(Run(tmp_path), processes=2, replay=False, steps=5)


def supervised(attempt: Attempt, *, rank: int, size: int, dies_of: str) -> int:
    """Exit code of a rank's supervisor in a job, whose trainer dies of a signal before it listens."""
    folder = attempt.run.folder
    variables = {"PROCID": rank, "NTASKS": size, "LOCALID": rank, "NODEID": 0, "STEP_TASKS_PER_NODE": size}
    environment = dict(os.environ) | {f"SLURM_{name}": str(value) for name, value in variables.items()}
    environment["PYTHONPATH"] = str(dying(folder / "early", [("train", dies_of)]))
    module = "asyncpp_cli.launch.common.supervisor"
    return ran(sys.executable, "-P", "-m", module, folder, "1", env=environment).code


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_trainer_that_dies_of_it_was_told_to_end(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    attempt = claimed(Run(tmp_path), processes=1, replay=True, steps=5)
    code = supervised(attempt, rank=0, size=1, dies_of=name)
    status = attempt.run.status()
    assert (status.state, status.cause) == (State.INTERRUPTED, Cause.STOPPED), status.reason
    assert status.reason == f"rank 0 was told to end by {name}"
    # Otherwise srun would end those that still save.
    assert code == 0


def test_a_trainer_that_is_ended_since_another_failed_was_not_told(attempt: Attempt) -> None:
    """srun tells the others to end when a rank has failed, and then they die of that."""
    first_failed(attempt)
    supervised(attempt, rank=1, size=2, dies_of="SIGTERM")
    status = attempt.run.status()
    assert (status.state, status.reason) == (State.FAILED, "rank 0: ValueError: loss is not finite")


OVER = (JobPhase.ENDING, JobPhase.PENDING, JobPhase.ENDED)


def end_of(code: int, phase: JobPhase, **changes: Any) -> JobEnd:
    seen = {"broken": "", "limit_near": False, "limit_reached": False} | changes
    return JobEnd(srun_code=code, signalled=False, phase=phase, **seen)


@pytest.mark.parametrize(
    ("code", "name"),
    [(143, "SIGTERM"), (140, "SIGUSR2"), (-15, "SIGTERM"), (-12, "SIGUSR2"), (137, ""), (1, ""), (0, "")],
)
def test_the_signal_is_read_from_sruns_exit_code(code: int, name: str) -> None:
    number = signal_of(code)
    assert (number.name if number else "") == name


def nothing(attempt: Attempt) -> None:
    """No rank began."""


def job_told(attempt: Attempt) -> None:
    attempt.stop("the job was told to end by SIGTERM")


def first_saved(attempt: Attempt) -> None:
    """Rank 0 was told and saved."""
    attempt.record_start(0, GONE)
    attempt.stop("rank 0 was told to end by SIGTERM")
    end_rank(attempt, 0, code=RESUMABLE, signal_number=None, stopped=False)


def second_vanished(attempt: Attempt) -> None:
    attempt.record_start(1, GONE)


def first_failed(attempt: Attempt) -> None:
    attempt.record_start(0, GONE)
    attempt.record_error(0, ValueError("loss is not finite"))
    end_rank(attempt, 0, code=1, signal_number=None, stopped=False)


FAILED, STOPPED = (State.FAILED, Cause.KILLED), (State.INTERRUPTED, Cause.STOPPED)
TIME_LIMIT, RESTARTED = ((State.INTERRUPTED, cause) for cause in (Cause.TIME_LIMIT, Cause.RESTARTED))
NO_NODE = {"broken": "node n1 is down*"}
LIMIT = {"limit_reached": True}
"""What SLURM shows as the job ends at its time limit."""


@pytest.mark.parametrize(
    ("recorded", "code", "phase", "seen_by_job", "state", "corrected"),
    [
        (nothing, 143, JobPhase.RUNNING, {}, State.FAILED, STOPPED),
        (nothing, 140, JobPhase.RUNNING, {}, State.FAILED, STOPPED),
        (nothing, 140, JobPhase.RUNNING, {"limit_near": True}, State.FAILED, TIME_LIMIT),
        (nothing, 143, JobPhase.RUNNING, {"limit_near": True}, State.FAILED, STOPPED),
        (nothing, 137, JobPhase.RUNNING, {}, State.FAILED, None),
        (nothing, 1, JobPhase.RUNNING, {}, State.FAILED, None),
        *((nothing, code, JobPhase.ENDING, LIMIT, State.FAILED, TIME_LIMIT) for code in (143, 137)),
        *((nothing, 137, phase, {}, State.FAILED, STOPPED) for phase in OVER),
        *((nothing, 137, phase, NO_NODE, State.FAILED, RESTARTED) for phase in OVER),
        # SLURM's early signal came before a rank could hear it; at the limit the job alone was told.
        *((job_told, code, JobPhase.ENDING, LIMIT, State.INTERRUPTED, TIME_LIMIT) for code in (143, 137, 0)),
        # A preemption or a person ends it earlier.
        (job_told, 143, JobPhase.ENDING, {}, State.INTERRUPTED, None),
        # A preemption tells the ranks and not the job's own process.
        (first_saved, 143, JobPhase.RUNNING, {}, State.INTERRUPTED, None),
        # srun could not start one, and told the other.
        (first_saved, 1, JobPhase.RUNNING, {}, State.INTERRUPTED, FAILED),
        (second_vanished, 143, JobPhase.RUNNING, {}, State.FAILED, None),
        (first_failed, 143, JobPhase.RUNNING, {}, State.FAILED, None),
        (first_failed, 137, JobPhase.ENDING, {}, State.FAILED, None),
    ],
)
def test_how_an_attempt_ended_is_corrected_by_how_its_job_ended(
    recorded: Callable[[Attempt], None],
    code: int,
    phase: JobPhase,
    seen_by_job: dict[str, Any],
    state: State,
    corrected: tuple[State, Cause] | None,
    attempt: Attempt,
) -> None:
    recorded(attempt)
    status = settle(attempt.run, Knowledge(all_over=attempt.number))
    assert status.state == state
    if recorded is nothing:
        assert status.reason == "rank 0 never started"
    better = corrected_outcome(status, attempt, ranks=2, end=end_of(code, phase, **seen_by_job))
    assert (better[:2] if better else None) == corrected
    if better and corrected == FAILED:
        assert better[2] == "rank 1 never started"
    if better and corrected == RESTARTED:
        assert better[2].partition(";")[0] == "node n1 is down*"


def test_a_rank_that_vanished_was_killed_whatever_srun_then_told_the_other(attempt: Attempt) -> None:
    second_vanished(attempt)
    status = settle(attempt.run, Knowledge(all_over=attempt.number))
    first_saved(attempt)
    interrupted = replace(status, state=State.INTERRUPTED, cause=Cause.STOPPED)
    better = corrected_outcome(interrupted, attempt, ranks=2, end=end_of(143, JobPhase.RUNNING))
    assert better is not None
    assert better[0] == State.FAILED


def test_the_jobs_script_keeps_a_signal_until_its_program_listens(tmp_path: Path) -> None:
    # The second line is ended by the signal that the job is sent, too.
    site = replace(find_site("testcluster"), setup=["kill -USR2 $$", "sh -c 'kill -TERM $$'"])
    shape = JobShape(nodes=1, tasks=1, tasks_per_node=1, cpus_per_task=1, gpus_per_node=0)
    script = sbatch.script(
        site,
        tmp_path,
        BatchJob(name="e", shape=shape, tasks=1, code="none", command=sbatch.array_command("array-1.json")),
    )
    # Where the program stands, one that is sent another signal before it listens.
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "from asyncpp_cli.launch.common import early_signals\n"
        "early_signals.listen(signal.SIGTERM, signal.SIGUSR2)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print([number.name for number in early_signals.received])\n"
    )
    words = "-m asyncpp_cli.launch.job.array_entry array-1.json"
    assert words in script
    done = ran("bash", "-c", script.replace(words, str(program)), cwd=tmp_path)
    assert (done.code, done.output.strip()) == (0, "['SIGUSR2', 'SIGTERM']")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
