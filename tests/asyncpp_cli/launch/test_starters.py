"""Ranks that torchrun, mpiexec or a script starts, one process each: they meet in the run's folder."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.launches import LONG, ONE, check_same, runs_attempt, sweep, wait_for

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch import joining
from asyncpp_cli.launch.common.rank_env import STARTERS, RankEnv, read_rank_env
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.processes import is_gone, process_id
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State

TRAIN = ["-m", "asyncpp_cli", "train"]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command in a process group of its own, without the variables of other starters."""
    started: list[subprocess.Popen[str]] = []
    inherited = {starter.rank for starter in STARTERS} | {starter.size for starter in STARTERS}
    clean = {name: value for name, value in os.environ.items() if name not in inherited}

    def begin(*command: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=clean | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=250)


def torchrun_agents(start: Start, run: Run) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = []
    for node, address in enumerate(("127.0.0.1", "127.0.0.2")):
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
        options += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--local-addr", address]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        agents.append(start(*command, *TRAIN, str(run.folder)))
    return agents


def mpiexec(start: Start, run: Run) -> list[subprocess.Popen[str]]:
    if shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec here")
    return [start("mpiexec", "-n", "2", sys.executable, *TRAIN, str(run.folder))]


@pytest.mark.slow
@pytest.mark.parametrize("begin", [torchrun_agents, mpiexec])
def test_a_run_killed_rank_by_rank_ends_with_the_bits_of_an_undisturbed_one(
    begin: Callable[[Start, Run], list[subprocess.Popen[str]]],
    start: Start,
    undisturbed: Run,
    tmp_path: Path,
) -> None:
    [disturbed] = sweep(tmp_path / "disturbed", *LONG).runs
    starters = begin(start, disturbed)
    wait_for(lambda: runs_attempt(disturbed, 1), seconds=250)
    processes = [Attempt(disturbed, 1).processes(rank)[0] for rank in (0, 1)]
    killed = random.randrange(2)
    if len(starters) == 2:
        starters[killed].kill()
    os.kill(processes[killed].pid, signal.SIGKILL)
    wait_for(lambda: all(is_gone(process) for process in processes), seconds=250)
    for starter in starters:
        starter.communicate(timeout=250)
        assert starter.returncode != 0
    for starter in begin(start, disturbed):
        _, errors = starter.communicate(timeout=500)
        assert starter.returncode == 0, errors
    assert (disturbed.status().state, disturbed.status().attempt) == (State.COMPLETED, 2)
    check_same(disturbed, undisturbed)
    # A starter that starts completed ranks again, one of them or all, comes to an end.
    for starter in begin(start, disturbed):
        _, errors = starter.communicate(timeout=500)
        assert starter.returncode == 0, errors
        assert "is completed: nothing is left to train" in errors
    assert disturbed.status().attempt == 2


def refused(process: subprocess.Popen[str]) -> str:
    """The line with which it ended."""
    _, errors = process.communicate(timeout=250)
    assert (process.returncode, errors.count("\n")) == (2, 1), errors
    return errors


@pytest.mark.slow
def test_ranks_that_do_not_fit_together_are_refused_in_one_line(start: Start, tmp_path: Path) -> None:
    changes = ["matrix={schedule: 1f1b, optimizer: adamw}", "exclude=[]", "train.steps=1"]
    [few] = sweep(tmp_path / "few", *changes, "site.start_timeout=1").runs
    [other] = sweep(tmp_path / "other", *changes, "site.start_timeout=200").runs

    def rank(run: Run, number: int) -> subprocess.Popen[str]:
        return start(sys.executable, *TRAIN, str(run.folder), PMI_RANK=str(number), PMI_SIZE="2")

    # Both are there, but each machine has a folder of its own.
    elsewhere = Run(shutil.copytree(few.folder, tmp_path / "elsewhere" / few.id))
    first, second = rank(few, 0), rank(elsewhere, 1)
    assert "1 of 2 ranks" in (line := refused(first))
    assert "see this folder" in line
    assert "rank 0 did not begin" in (line := refused(second))
    assert "does it see this folder?" in line
    assert few.status().state == elsewhere.status().state == State.PENDING
    wrong = start(sys.executable, *TRAIN, str(few.folder), FLUX_TASK_RANK="0", FLUX_JOB_SIZE="3")
    assert "2 ranks" in refused(wrong)

    first = rank(other, 0)
    call = other.attempts / "joining" / "call.json"
    wait_for(call.exists, seconds=250)
    again = rank(other, 0)
    assert "rank 0" in refused(first)
    config = other.config_file.read_text()
    other.config_file.write_text(config.replace("start_timeout: 200", "start_timeout: 201"))
    assert other.config_file.read_text() != config
    assert all("another config.yaml" in refused(process) for process in (rank(other, 1), again))


@pytest.fixture
def pending(tmp_path: Path) -> Run:
    [run] = sweep(tmp_path / "e", *ONE, "site.start_timeout=200").runs
    return run


def meet(run: Run, rank: int, *, size: int) -> tuple[int, int, int]:
    """Meet the other ranks, as a process does; the number of the attempt, and the place on the machine."""
    env = RankEnv(rank=rank, size=size, local_rank=rank, local_size=size, supervised=False)
    attempt, placed = joining._meet(run, env, config=run.config())
    return attempt.number, placed.local_rank, placed.local_size


def test_a_rank_is_refused_that_has_answered_already(pending: Run) -> None:
    with ThreadPoolExecutor() as threads:
        first = [threads.submit(meet, pending, rank, size=3) for rank in (0, 1)]
        answers = pending.attempts / "joining"
        wait_for(lambda: bool(list(answers.glob("*/rank-1.json"))), seconds=250)
        with pytest.raises(UserError, match=r"rank 1 of .* is there twice"):
            meet(pending, 1, size=3)
        assert meet(pending, 2, size=3) == (1, 2, 3)
        assert [each.result(timeout=250) for each in first] == [(1, 0, 3), (1, 1, 3)]


def test_an_answer_left_over_from_a_killed_start_is_not_another_rank(
    pending: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again, rank 1 comes first and finds the call and the answer of ranks that are gone."""
    killed = subprocess.Popen(["true"])
    gone = process_id(killed.pid)
    killed.wait()
    assert is_gone(gone)
    left_over = joining._Call(word="f" * 32, settings="", by=gone)
    file = pending.attempts / "joining" / left_over.word / "rank-1.json"
    file.parent.mkdir(parents=True)
    write_record(file.parent.with_name("call.json"), left_over)
    write_record(file, joining._Answer(settings="", machine="", process=gone))
    seen, read = threading.Event(), joining._read

    def watched(path: Path, kind: type[Any]) -> Any:
        found = read(path, kind)
        if path == file:
            seen.set()
        return found

    monkeypatch.setattr(joining, "_read", watched)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, pending, 1, size=2)
        assert seen.wait(timeout=250)
        assert (meet(pending, 0, size=2), first.result(timeout=250)) == ((1, 0, 2), (1, 1, 2))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, 1),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, 1),
        ({"JOB_COMPLETION_INDEX": "1"}, 1),
        # torchrun in a pod, and mpiexec's two ranks on one node of an allocation.
        ({"RANK": "0", "WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"}, 0),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 1),
        # torchrun chooses ranks itself.
        (
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
            | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            0,
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            "RANK is 0 and SLURM_PROCID is 1",
        ),
        ({"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX is 2; accepted: 0 to 1"),
        ({"PMI_RANK": "one", "PMI_SIZE": "2"}, "PMI_RANK is 'one'"),
    ],
)
def test_the_rank_is_read_from_what_the_starter_sets(
    variables: Mapping[str, str], expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for starter in STARTERS:
        for name in (starter.rank, starter.size or starter.rank, "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            read_rank_env(2)
    else:
        assert (read_rank_env(2).rank, read_rank_env(2).size) == (expected, 2)
