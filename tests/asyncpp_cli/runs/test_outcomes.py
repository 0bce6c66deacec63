"""How an attempt ends: state, cause and reason of the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.attempts import claimed, fall
from support.command_line import asyncpp, succeeded
from support.files import edit
from support.launches import ONE, sweep
from support.rows import plain, step_row, typed
from support.small_runs import small_config

from asyncpp_cli.base.errors import TakenOverError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import check_current, claim, record_processes
from asyncpp_cli.runs.attempts.files import Claimed, RankError, RankStart
from asyncpp_cli.runs.attempts.outcome import blamed_rank
from asyncpp_cli.runs.attempts.recorder import RunRecorder
from asyncpp_cli.runs.attempts.settle import Knowledge, current_status, settle
from asyncpp_cli.runs.config_file import config_text
from asyncpp_cli.runs.processes import process_id, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status
from stages.comm.rendezvous.client import GoneError
from stages.rows import Start


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


START = {"kind": "start", "step": 0, "attempt": 1}

END = {"kind": "end", "step": 5, "weights_sha256": "0123456789abcdef" * 4}


def write_rows(run: Run, *rows: dict[str, object], torn: str = "") -> None:
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def ended(attempt: Attempt, *codes: int, stopped: bool = False) -> Status:
    """The status after ranks have ended with these codes (of a signal where negative)."""
    for rank in range(len(codes)):
        attempt.record_start(rank, this_process())
    record_processes(attempt, [os.getpid()] * len(codes))
    for rank, code in enumerate(codes):
        fall(attempt, rank, code, stopped=stopped)
    return attempt.run.status()


def test_a_run_is_completed_when_every_rank_ended_well(run: Run) -> None:
    attempt = claimed(run, processes=2, replay=False, steps=5)
    write_rows(run, START, END)
    status = ended(attempt, 0, 0)
    assert (status.state, status.step, status.reason) == (State.COMPLETED, 5, "")
    assert status.pids == [os.getpid()] * 2
    assert claim(run, processes=2, replay=False, steps=5) is None


@pytest.mark.parametrize("codes", [(0, 0), (1, -9)])
def test_what_status_json_said_is_told_by_the_attempt_when_it_is_removed(
    run: Run, codes: tuple[int, int]
) -> None:
    config = small_config(text=run.folder, **{"train.steps": 5})
    run.config_file.write_text(config_text(config))
    attempt = claimed(run, processes=2, replay=False, steps=5)
    for rank in range(2):
        attempt.record_start(rank, this_process())
    run.status_file.unlink()
    running = current_status(run)
    assert (running.state, running.attempt, running.steps) == (State.RUNNING, 1, 5)
    assert claim(run, processes=2, replay=False, steps=5) is None
    write_rows(run, START, END)
    before = ended(attempt, *codes)
    run.status_file.unlink()
    after = current_status(run)
    assert (after.state, after.step, after.cause) == (before.state, before.step, before.cause)


@pytest.mark.parametrize(
    ("rows", "torn", "lacks"),
    [
        (None, "", "No such file"),
        ([], "", "it is empty"),
        ([START, step_row(1)], "", "the last row of metrics.jsonl is of kind step, not the end row"),
        ([START], json.dumps(END), "the last row of metrics.jsonl is damaged"),
        ([START, END, step_row(5)], "", "kind step"),
        ([START, END | {"step": 4}], "", "the end row of metrics.jsonl is of step 4, and the run has 5"),
        ([START, END | {"weights_sha256": None}], "", "no hash of the weights"),
        ([START | {"attempt": 7}, END], "", "no row of this attempt"),
        ([END], "", "no row of this attempt"),
    ],
)
def test_a_run_without_its_end_row_is_not_completed(
    run: Run, rows: list[dict[str, object]] | None, torn: str, lacks: str
) -> None:
    attempt = claimed(run, processes=2, replay=False, steps=5)
    if rows is not None:
        write_rows(run, *rows, torn=torn)
    status = ended(attempt, 0, 0)
    assert (status.state, status.cause) == (State.FAILED, Cause.ERROR)
    assert status.reason.startswith("its processes ended with exit code 0, but ")
    assert lacks in status.reason
    assert claim(run, processes=2, replay=False, steps=5) is not None


def test_the_reason_is_the_first_cause_and_names_rank_and_signal(run: Run) -> None:
    attempt = claimed(run, processes=3, replay=False, steps=5)
    attempt.record_error(0, ConnectionError("the other side\nis gone"))
    status = ended(attempt, 1, -9, 1)
    assert status.state == State.FAILED
    assert status.reason == "rank 1 was killed by SIGKILL (signal 9)"

    attempt = claimed(run, processes=2, replay=False, steps=5)
    assert attempt.number == 2
    attempt.record_error(1, FloatingPointError("loss is not finite"))
    time.sleep(0.01)
    attempt.record_error(0, ConnectionError("the other side\nis gone"))
    # Rank 1 was aborted after its exception: what it said itself is the cause.
    assert ended(attempt, 1, -6).reason == "rank 1: FloatingPointError: loss is not finite"

    # The first to say so counts, not the one whose machine's clock is behind.
    attempt = claimed(run, processes=2, replay=False, steps=5)
    attempt.record_error(1, FloatingPointError("loss is not finite"))
    attempt.record_error(0, ValueError("a consequence"))
    edit(attempt.file(RankError, 0), time=time.time() - 3600)
    assert ended(attempt, 1, 1).reason == "rank 1: FloatingPointError: loss is not finite"
    assert blamed_rank(attempt) == 1

    # Who says that another is gone may say so first.
    attempt = claimed(run, processes=2, replay=False, steps=5)
    attempt.record_error(0, GoneError("rank 1 is gone: its process ended"))
    time.sleep(0.01)
    attempt.record_error(1, FloatingPointError("loss is not finite"))
    assert ended(attempt, 1, 1).reason == "rank 1: FloatingPointError: loss is not finite"

    attempt = claimed(run, processes=2, replay=False, steps=5)
    attempt.log_file(0).write_text("Traceback\nMemoryError: none left\n\n")
    assert "exit code 1: MemoryError: none left (logs/attempt-5-rank-0.log)" in ended(attempt, 1, 0).reason


class OutOfMemoryError(RuntimeError):
    """By the name of torch's, which a command that starts without torch knows it by."""


@pytest.mark.parametrize("kind", [MemoryError, OutOfMemoryError])
def test_a_rank_out_of_memory_is_the_cause_and_not_the_neighbour_it_took_with_it(
    run: Run, kind: type[Exception]
) -> None:
    attempt = claimed(run, processes=3, replay=False, steps=1)
    # NCCL aborts the neighbour at once, and the rank itself ends with the interpreter.
    fall(attempt, 0, -6)
    attempt.record_error(2, ConnectionError("gone"))
    fall(attempt, 2, 1)
    attempt.record_error(1, kind("tried to allocate 2 GiB"))
    fall(attempt, 1, -6)
    status = run.status()
    assert status.cause == Cause.OUT_OF_MEMORY
    assert status.reason == f"rank 1: {kind.__name__}: tried to allocate 2 GiB"
    assert blamed_rank(attempt) == 1


def test_a_run_that_was_told_to_end_is_interrupted(run: Run) -> None:
    attempt = claimed(run, processes=2, replay=False, steps=5)
    attempt.stop("Ctrl-C")
    attempt.stop("too late to be the reason")
    status = ended(attempt, -15, 1, stopped=True)
    assert (status.state, status.reason) == (State.INTERRUPTED, "Ctrl-C")
    assert claim(run, processes=2, replay=False, steps=5) is not None


def test_a_run_whose_processes_vanished_is_settled_by_whoever_looks(run: Run) -> None:
    attempt = claimed(run, processes=1, replay=True, steps=5)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        attempt.record_start(0, process_id(child.pid))
        assert settle(run).state == State.RUNNING
        child.kill()
    status = settle(run)
    assert status.state == State.FAILED
    assert status.reason == "rank 0 vanished: killed by SIGKILL, or its machine stopped"
    with pytest.raises(RuntimeError, match="over"):
        check_current(attempt)
    # A rank that never started ends the attempt once nobody can start it.
    attempt = claimed(run, processes=2, replay=False, steps=5)
    assert settle(run).state == State.RUNNING
    status = settle(run, Knowledge(none_to_come=attempt.number))
    assert (status.state, status.reason) == (State.FAILED, "rank 0 never started")


def test_the_end_of_an_attempt_is_not_taken_for_that_of_the_next(run: Run) -> None:
    """A job that SLURM had lost learns of its end when the run has long been started elsewhere."""
    first = claimed(run, processes=1, replay=True, steps=5)
    assert settle(run, Knowledge(all_over=first.number)).state == State.FAILED
    second = claimed(run, processes=1, replay=True, steps=5)
    for status in (
        settle(run, Knowledge(none_to_come=first.number)),
        settle(run, Knowledge(all_over=first.number)),
    ):
        assert (status.state, status.attempt) == (State.RUNNING, second.number)


@pytest.mark.parametrize(("lease", "state"), [(60.0, State.FAILED), (7200.0, State.RUNNING)])
def test_a_run_elsewhere_is_over_when_its_lease_is_by_the_file_servers_clock(
    lease: float, state: State, run: Run, tmp_path: Path
) -> None:
    config = small_config(text=tmp_path, **{"site.lease": lease})
    run.config_file.write_text(config_text(config))
    attempt = claimed(run, processes=1, replay=False, steps=5)
    elsewhere = replace(this_process(), host="elsewhere")
    attempt.record_start(0, elsewhere)
    edit(attempt.file(Claimed), by=asdict(elsewhere))
    # The clocks of both machines are wrong.
    run.write_status(replace(run.status(), started=0.0, updated=0.0))
    assert settle(run).state == State.RUNNING
    run.write_status(replace(run.status(), updated=time.time() + 1e6))
    hour_ago = time.time() - 3600
    os.utime(attempt.file(RankStart, 0), (hour_ago, hour_ago))
    assert settle(run).state == state


def test_an_age_goes_on_where_the_file_servers_clock_is_set(run: Run) -> None:
    attempt = claimed(run, processes=1, replay=False, steps=5)
    file = attempt.file(Claimed)
    os.utime(file, (time.time() + 7200, time.time() + 7200))  # the server was two hours ahead
    first = run.age(file)
    time.sleep(0.01)
    assert 0.0 <= first < run.age(file) < 250.0
    (run.folder / "lock").unlink()  # then this machine's clock counts, less what it may be ahead
    os.utime(file, (time.time() - 100, time.time() - 100))
    assert 80.0 <= run.age(file) < 330.0


def recording(attempt: Attempt) -> RunRecorder:
    recorder = RunRecorder(attempt.run, attempt=attempt.number)
    recorder.append(Start(step=0, tokens_per_step=8))
    return recorder


def test_a_frozen_attempt_that_goes_on_after_the_next_has_begun_writes_nothing(run: Run) -> None:
    first = claimed(run, processes=1, replay=True, steps=4)
    frozen = recording(first)
    frozen.heartbeat(1, train_loss=1.0, tokens_per_second=1.0)
    settle(run, Knowledge(all_over=first.number))
    recorder = recording(claimed(run, processes=1, replay=True, steps=4))
    written = run.metrics_file.read_bytes(), run.status_file.read_bytes()
    for write in (lambda: frozen.append(typed(step_row(1))), frozen.flush):
        with pytest.raises(TakenOverError, match="attempt 2 has begun"):
            write()
    frozen.timeline({})
    frozen.close()
    assert (run.metrics_file.read_bytes(), run.status_file.read_bytes()) == written
    assert run.timeline() is None
    recorder.append(typed(step_row(1)))
    recorder.close()
    assert [row["kind"] for row in plain(run)] == ["start", "step"]


def test_a_status_that_was_being_written_as_the_next_attempt_began_is_lost(run: Run) -> None:
    """The worst moment to be frozen: after the look for the next attempt, before the file is in its place."""
    first = claimed(run, processes=1, replay=True, steps=4)
    stale = run.status()
    settle(run, Knowledge(all_over=first.number))

    def goes_on_after_the_next_claim() -> bool:
        assert claimed(run, processes=1, replay=True, steps=4).number == 2
        return False

    with pytest.raises(FileNotFoundError):
        run.write_status(stale, unless=goes_on_after_the_next_claim)
    assert run.status().attempt == 2


MODEL = """
import os, sys, torch
from torch import nn

class Leaving(nn.Linear):
    def forward(self, x):
        sys.exit(75)

class Failing(nn.Linear):
    def forward(self, x):
        return super().forward(x) @ torch.ones(3, 3)

def linear(config, context):
    blocks = [nn.Linear(config.width, config.width) for _ in range(config.layers)]
    return nn.Embedding(config.vocab_size, config.width), blocks, nn.Linear(config.width, config.vocab_size)

def exit_0(config, context):
    raise SystemExit(0)

def in_forward(config, context):
    embedding, blocks, head = linear(config, context)
    return embedding, [*blocks[:-1], Leaving(config.width, config.width)], head

def failing(config, context):
    embedding, blocks, head = linear(config, context)
    return embedding, [*blocks[:-1], Failing(config.width, config.width)], head
"""


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("exit_0", r"own_models:exit_0 ended the process \(SystemExit: 0\) \(FILE, line 18\)"),
        ("in_forward", r"the run's own code ended the process \(SystemExit: 75\) \(FILE, line 7\)"),
        ("failing", r"the run's own code fails \(RuntimeError: .*shapes.*\) \(FILE, line 11\)"),
        ("linear", ""),
    ],
)
@pytest.mark.slow
def test_a_model_that_fails_or_ends_the_process_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None, factory: str, reason: str
) -> None:
    (tmp_path / "own_models.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("to be or not to be " * 400)
    monkeypatch.syspath_prepend(tmp_path)
    changes = [f"model.factory=own_models:{factory}", f"data.path={tmp_path / 'text.txt'}", "train.steps=2"]
    [run] = sweep(tmp_path / "e", *ONE, *changes).runs
    if reason:
        refused = asyncpp("train", run.folder, "--replay")
        assert refused.code == 2
        assert "Traceback" not in refused.errors
    else:
        succeeded("train", run.folder, "--replay")
    status = run.status()
    assert status.state == (State.FAILED if reason else State.COMPLETED), status.reason
    assert re.search(reason.replace("FILE", str(tmp_path / "own_models.py")), status.reason)
