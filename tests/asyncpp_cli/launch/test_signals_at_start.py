"""Signals that come before a process listens: being told to end, and no failure of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.attempts import claimed
from support.launches import dying

from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.launch.job.array_task import JobEnd, corrected_outcome, signal_of
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.sbatch import BatchJob
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.settle import end_rank, settle
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_trainer_that_dies_of_it_was_told_to_end(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.config_file.write_text(CONFIG)
    claimed(run, processes=1, replay=True, steps=5)
    rank = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    environment = dict(os.environ) | rank | {"SLURM_STEP_TASKS_PER_NODE": "1"}
    environment["PYTHONPATH"] = str(dying(tmp_path / "early", [("train", name)]))
    command = [sys.executable, "-P", "-m", "asyncpp_cli.launch.common.supervisor", str(run.folder), "1"]
    ended = subprocess.run(command, env=environment, timeout=100, check=False)
    status = run.status()
    assert (status.state, status.cause) == (State.INTERRUPTED, Cause.STOPPED), status.reason
    assert status.reason == f"rank 0 was told to end by {name}"
    # Otherwise srun would end those that still save.
    assert ended.returncode == 0


def test_a_trainer_that_is_ended_since_another_failed_was_not_told(tmp_path: Path, attempt: Attempt) -> None:
    """srun tells the others to end when a rank has failed, and then they die of that."""
    attempt.record_start(0, GONE)
    attempt.record_error(0, ValueError("loss is not finite"))
    end_rank(attempt, 0, code=1, signal_number=None, stopped=False)
    rank = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    environment = dict(os.environ) | rank | {"SLURM_STEP_TASKS_PER_NODE": "2"}
    environment["PYTHONPATH"] = str(dying(tmp_path / "early", [("train", "SIGTERM")]))
    command = [sys.executable, "-P", "-m", "asyncpp_cli.launch.common.supervisor", str(tmp_path), "1"]
    subprocess.run(command, env=environment, timeout=100, check=False)
    status = attempt.run.status()
    assert (status.state, status.reason) == (State.FAILED, "rank 0: ValueError: loss is not finite")


def settled(attempt: Attempt) -> Status:
    return settle(attempt.run, all_over=attempt.number)


def end_of(
    code: int | None,
    phase: JobPhase = JobPhase.RUNNING,
    *,
    near: bool = False,
    reached: bool = False,
    broken: str = "",
) -> JobEnd:
    return JobEnd(
        srun_code=code, signalled=False, phase=phase, broken=broken, limit_near=near, limit_reached=reached
    )


@pytest.mark.parametrize(
    ("code", "name"),
    [(143, "SIGTERM"), (140, "SIGUSR2"), (-15, "SIGTERM"), (-12, "SIGUSR2"), (137, ""), (1, ""), (0, "")],
)
def test_the_signal_is_read_from_sruns_exit_code(code: int, name: str) -> None:
    number = signal_of(code)
    assert (number.name if number else "") == name


@pytest.mark.parametrize(
    ("code", "near", "seen"),
    [
        (143, False, (State.INTERRUPTED, Cause.STOPPED)),
        (140, False, (State.INTERRUPTED, Cause.STOPPED)),
        (140, True, (State.INTERRUPTED, Cause.TIME_LIMIT)),
        (143, True, (State.INTERRUPTED, Cause.STOPPED)),
        (137, False, None),
        (1, False, None),
    ],
)
def test_ranks_that_never_began(
    attempt: Attempt, code: int, near: bool, seen: tuple[State, Cause] | None
) -> None:
    status = settled(attempt)
    assert (status.state, status.reason) == (State.FAILED, "rank 0 never started")
    better = corrected_outcome(status, attempt, ranks=2, end=end_of(code, near=near))
    assert (better[:2] if better else None) == seen


def test_one_rank_told_before_it_listened_and_the_other_after(attempt: Attempt) -> None:
    attempt.record_start(0, GONE)
    attempt.stop("rank 0 was told to end by SIGTERM")
    end_rank(attempt, 0, code=RESUMABLE, signal_number=None, stopped=False)
    status = settled(attempt)
    assert status.state == State.INTERRUPTED
    # A preemption tells the ranks and not the job's own process.
    assert corrected_outcome(status, attempt, ranks=2, end=end_of(143)) is None
    # srun could not start one, and told the other.
    assert corrected_outcome(status, attempt, ranks=2, end=end_of(1)) == (
        State.FAILED,
        Cause.KILLED,
        "rank 1 never started",
    )


def test_a_rank_that_vanished_was_killed_whatever_srun_then_told_the_other(attempt: Attempt) -> None:
    attempt.record_start(1, GONE)
    status = settled(attempt)
    assert corrected_outcome(status, attempt, ranks=2, end=end_of(143)) is None
    attempt.record_start(0, GONE)
    end_rank(attempt, 0, code=RESUMABLE, signal_number=None, stopped=False)
    attempt.stop("rank 0 was told to end by SIGTERM")
    interrupted = replace(status, state=State.INTERRUPTED, cause=Cause.STOPPED)
    better = corrected_outcome(interrupted, attempt, ranks=2, end=end_of(143))
    assert better is not None
    assert better[0] == State.FAILED


def test_a_job_that_ran_into_its_limit_unheard_goes_on(attempt: Attempt) -> None:
    """SLURM's early signal came before a rank could hear it; at the limit the job alone was told."""
    attempt.stop("the job was told to end by SIGTERM")
    status = settled(attempt)
    assert (status.state, status.cause) == (State.INTERRUPTED, Cause.STOPPED)
    for code in (143, 137, 0):
        better = corrected_outcome(status, attempt, ranks=2, end=end_of(code, JobPhase.ENDING, reached=True))
        assert better is not None
        assert better[:2] == (State.INTERRUPTED, Cause.TIME_LIMIT)
    # A preemption or a person ends it earlier.
    assert corrected_outcome(status, attempt, ranks=2, end=end_of(143, JobPhase.ENDING)) is None


@pytest.mark.parametrize("code", [143, 137])
def test_ranks_that_the_limit_ended_before_they_began_go_on(attempt: Attempt, code: int) -> None:
    better = corrected_outcome(
        settled(attempt), attempt, ranks=2, end=end_of(code, JobPhase.ENDING, reached=True)
    )
    assert better is not None
    assert better[:2] == (State.INTERRUPTED, Cause.TIME_LIMIT)


@pytest.mark.parametrize("phase", [JobPhase.ENDING, JobPhase.PENDING, JobPhase.ENDED])
def test_ranks_that_slurm_killed_have_not_failed(attempt: Attempt, phase: JobPhase) -> None:
    status = settled(attempt)
    better = corrected_outcome(status, attempt, ranks=2, end=end_of(137, phase))
    assert better is not None
    assert better[:2] == (State.INTERRUPTED, Cause.STOPPED)
    broken = end_of(137, phase, broken="node n1 is down*")
    better = corrected_outcome(status, attempt, ranks=2, end=broken)
    assert better is not None
    assert (better[1], better[2].partition(";")[0]) == (Cause.RESTARTED, "node n1 is down*")


def test_an_error_of_a_rank_stays_one(attempt: Attempt) -> None:
    attempt.record_start(0, GONE)
    attempt.record_error(0, ValueError("loss is not finite"))
    end_rank(attempt, 0, code=1, signal_number=None, stopped=False)
    status = settled(attempt)
    for end in (end_of(143), end_of(137, JobPhase.ENDING)):
        better = corrected_outcome(status, attempt, ranks=2, end=end)
        assert better is None, better


def test_the_jobs_script_keeps_a_signal_until_its_program_listens(tmp_path: Path) -> None:
    # The second line is ended by the signal that the job is sent, too.
    site = replace(find_site("testcluster"), setup=["kill -USR2 $$", "sh -c 'kill -TERM $$'"])
    shape = JobShape(nodes=1, tasks=1, tasks_per_node=1, cpus_per_task=1, gpus_per_node=0)
    script = sbatch.array_script(
        site, tmp_path, BatchJob(name="e", shape=shape, tasks=1, code="none", manifest="array-1.json")
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
    command = ["bash", "-c", script.replace(words, str(program))]
    ran = subprocess.run(command, cwd=tmp_path, timeout=60, check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "['SIGUSR2', 'SIGTERM']"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
