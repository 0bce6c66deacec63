"""Ranks that torchrun or a script with its variables starts, one process each."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launches import LONG, check_same, runs_attempt, sweep, wait_for

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common.rank_env import VARIABLES, read_rank_env
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.processes import is_gone
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State

TRAIN = ["-m", "asyncpp_cli", "train"]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command in a process group of its own, without the variables of a torchrun around."""
    started: list[subprocess.Popen[str]] = []
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}

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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def torchrun_agents(start: Start, run: Run) -> list[subprocess.Popen[str]]:
    port = free_port()
    agents = []
    for node, address in enumerate(("127.0.0.1", "127.0.0.2")):
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
        options += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--local-addr", address]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        agents.append(start(*command, *TRAIN, str(run.folder)))
    return agents


@pytest.mark.slow
def test_a_run_killed_rank_by_rank_ends_with_the_bits_of_an_undisturbed_one(
    start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    [disturbed] = sweep(tmp_path / "disturbed", *LONG).runs
    starters = torchrun_agents(start, disturbed)
    wait_for(lambda: runs_attempt(disturbed, 1), seconds=250)
    processes = [Attempt(disturbed, 1).processes(rank)[0] for rank in (0, 1)]
    killed = random.randrange(2)
    starters[killed].kill()
    os.kill(processes[killed].pid, signal.SIGKILL)
    wait_for(lambda: all(is_gone(process) for process in processes), seconds=250)
    for starter in starters:
        starter.communicate(timeout=250)
        assert starter.returncode != 0
    for starter in torchrun_agents(start, disturbed):
        _, errors = starter.communicate(timeout=500)
        assert starter.returncode == 0, errors
    assert (disturbed.status().state, disturbed.status().attempt) == (State.COMPLETED, 2)
    check_same(disturbed, undisturbed)
    # A starter that starts completed ranks again, one of them or all, comes to an end.
    for starter in torchrun_agents(start, disturbed):
        _, errors = starter.communicate(timeout=500)
        assert starter.returncode == 0, errors
        assert "is completed: nothing is left to train" in errors
    assert disturbed.status().attempt == 2


def refused(process: subprocess.Popen[str]) -> str:
    """The line with which it ended; torch may have said before that it could not connect."""
    _, errors = process.communicate(timeout=250)
    assert (process.returncode, errors.count("asyncpp: error: "), "Traceback" in errors) == (2, 1, False)
    return errors.splitlines()[-1]


@pytest.mark.slow
def test_ranks_that_do_not_fit_together_are_refused_in_one_line(start: Start, tmp_path: Path) -> None:
    """Started by hand, with torchrun's variables and no agent."""
    changes = ["matrix={schedule: 1f1b, optimizer: adamw}", "exclude=[]", "train.steps=1"]
    [few] = sweep(tmp_path / "few", *changes, "site.start_timeout=2").runs
    [other] = sweep(tmp_path / "other", *changes, "site.start_timeout=200").runs

    def rank(run: Run, number: int, *, size: int = 2, port: int) -> subprocess.Popen[str]:
        given = {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": size}
        variables = {name: str(value) for name, value in given.items()}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return start(sys.executable, *TRAIN, str(run.folder), **variables, **where)

    alone, without_first = rank(few, 0, port=free_port()), rank(few, 1, port=free_port())
    assert "rank 1 of" in (line := refused(alone))
    assert "did not come within 2 s (site.start_timeout)" in line
    assert "rank 0 of" in refused(without_first)
    assert few.status().state == State.PENDING
    assert "2 ranks" in refused(rank(few, 0, size=3, port=free_port()))

    # Each machine has a folder of its own, which differ.
    port = free_port()
    elsewhere = Run(shutil.copytree(other.folder, tmp_path / "elsewhere" / other.id))
    config = elsewhere.config_file.read_text()
    elsewhere.config_file.write_text(config.replace("start_timeout: 200", "start_timeout: 201"))
    both = [rank(other, 0, port=port), rank(elsewhere, 1, port=port)]
    assert all("rank 1 has another config.yaml or version of asyncpp" in refused(each) for each in both)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("1 2 1 2", (1, 2)),
        ("0 1 0 1", (0, 1)),
        ("1 2", (0, 1)),  # a starter that does not say which ranks share a machine
        ("2 2 0 2", "RANK is 2; accepted: 0 to 1"),
        ("one 2 0 1", "RANK is 'one'"),
    ],
)
def test_the_rank_is_read_from_what_torchrun_sets(
    variables: str, expected: tuple[int, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(VARIABLES, variables.split(), strict=False):
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            read_rank_env()
    else:
        assert (read_rank_env().rank, read_rank_env().size) == expected
