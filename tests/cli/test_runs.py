"""The run folder: what survives a kill, what a reader makes of damage, and who may run a run."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpp_cli.cluster.attempts import Attempt, look, settle
from asyncpp_cli.cluster.claims import claim, enter
from asyncpp_cli.cluster.outcome import blamed_rank
from asyncpp_cli.cluster.processes import is_gone, process_id, this_process
from asyncpp_cli.code_version import asyncpp_version, commit
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.recorder import MetricsFile, RunRecorder
from asyncpp_cli.runs import Cause, Run, State, Status
from stages.member import GoneError


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def step_row(step: int) -> dict[str, object]:
    return {"kind": "step", "step": step, "train_loss": 1.0 / step, "tokens": 8 * step, "seconds": 0.5 * step}


@given(cut=st.integers(min_value=0, max_value=200))
@settings(max_examples=60, deadline=None)
def test_a_torn_line_costs_itself_alone(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    first = MetricsFile(run)
    for row in [{"kind": "start", "step": 0}, step_row(1), step_row(2)]:
        first.append(row)
    first.close()
    whole = run.metrics_file.read_bytes()
    cut = min(cut, len(whole))
    run.metrics_file.write_bytes(whole[:cut])
    kept = [json.loads(line) for line in whole[:cut].split(b"\n")[:-1]]
    last = whole[:cut].rpartition(b"\n")[2]
    if last in whole.split(b"\n") and last:
        kept.append(json.loads(last))  # only its line end is missing
    assert run.metrics() == kept

    second = MetricsFile(run)
    second.append(step_row(9))
    second.close()
    assert run.metrics() == [*kept, step_row(9)]


def test_steps_that_are_done_again_count_once(run: Run) -> None:
    metrics = MetricsFile(run)
    rows = [
        {"kind": "start", "step": 0, "attempt": 1},
        step_row(1),
        {"kind": "segment", "first_step": 0, "steps": 2},
        step_row(2),
        {"kind": "segment", "first_step": 2, "steps": 2},
        step_row(3),
        {"kind": "eval", "step": 3},
        {"kind": "end", "step": 3},
        {"kind": "start", "step": 2, "attempt": 2},
        step_row(3),
    ]
    for row in rows:
        metrics.append(row)
    metrics.close()
    assert run.metrics() == [*rows[:4], *rows[8:]]
    again = MetricsFile(run)
    again.append({"kind": "start", "step": 0, "attempt": 3})
    again.close()
    assert run.metrics() == [{"kind": "start", "step": 0, "attempt": 3}]


def test_where_a_step_has_several_updates_a_resumed_run_drops_by_updates(run: Run) -> None:
    metrics = MetricsFile(run)
    rows = [step_row(7), step_row(8), step_row(9), {"kind": "start", "step": 2, "updates": 8}, step_row(9)]
    for row in rows:
        metrics.append(row)
    metrics.close()
    assert run.metrics() == [*rows[:2], *rows[3:]]


def test_a_status_is_replaced_at_once_while_others_read(run: Run) -> None:
    run.write_status(Status(state=State.RUNNING, reason="x" * 1000))
    writer = multiprocessing.get_context("fork").Process(target=_write_statuses, args=(run,))
    writer.start()
    read = 0
    while writer.is_alive() or read == 0:
        assert run.status().reason in {"x" * 1000, "y" * 100_000}
        read += 1
    writer.join()
    assert writer.exitcode == 0
    assert read > 10
    assert [file.name for file in run.folder.iterdir()] == ["status.json"]


def _write_statuses(run: Run) -> None:
    for number in range(400):
        reason = "x" * 1000 if number % 2 else "y" * 100_000
        run.write_status(Status(state=State.RUNNING, reason=reason))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2, "state": "running"}', '{"format": 1, "state": "odd"}', '{"format": 1}'],
)
def test_a_damaged_status_is_reported_as_such(run: Run, text: str) -> None:
    run.status_file.write_text(text)
    with pytest.raises(DamagedError, match=r"status\.json"):
        run.status()
    assert look(run).state == State.DAMAGED
    assert "status.json" in look(run).reason


def test_json_files_keep_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_json(tmp_path / "file", {"a": 1})
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode
    assert read_json(tmp_path / "file", newest_format=1) == {"a": 1}


def test_the_recorder_says_how_far_the_run_is_and_which_attempt_wrote(run: Run) -> None:
    attempt = claim(run, processes=1, replay=True, steps=4)
    assert attempt is not None
    recorder = RunRecorder(run, attempt=attempt.number)
    recorder.append({"kind": "start", "step": 0})
    for step in (1, 2, 3):
        recorder.append(step_row(step))
        recorder.heartbeat(step, train_loss=1.0 / step, tokens_per_second=1.0)
    assert run.status().step == 1  # the later ones came too soon after it
    recorder.close()
    status = run.status()
    assert (status.state, status.step, status.steps, status.attempt) == (State.RUNNING, 3, 4, 1)
    assert (status.train_loss, status.tokens_per_second) == (1.0 / 3.0, 16.0)
    code = {"asyncpp": asyncpp_version(), "commit": commit()}
    assert run.metrics()[0] == {"kind": "start", "step": 0, "attempt": 1} | code


def test_only_one_of_many_claims_a_run(run: Run) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ready, done = context.Event(), context.Event()
    claimers = [context.Process(target=_claim, args=(run, ready, done, results)) for _ in range(8)]
    for claimer in claimers:
        claimer.start()
    ready.set()
    numbers = [results.get(timeout=30) for _ in claimers]
    done.set()
    for claimer in claimers:
        claimer.join()
    assert sorted(numbers) == [0] * 7 + [1]


def _claim(run: Run, ready: object, done: object, results: object) -> None:
    ready.wait()  # type: ignore[attr-defined]
    attempt = claim(run, processes=1, replay=True, steps=1)
    results.put(attempt.number if attempt is not None else 0)  # type: ignore[attr-defined]
    done.wait()  # type: ignore[attr-defined]


def ended(attempt: Attempt, *codes: int, stopped: bool = False) -> Status:
    """The status after ranks have ended with these codes (of a signal where negative)."""
    for rank in range(len(codes)):
        attempt.rank_started(rank, this_process())
        enter(attempt, rank)
    for rank, code in enumerate(codes):
        attempt.rank_ended(
            rank,
            code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            stopped=stopped,
        )
    return attempt.run.status()


def test_a_run_is_completed_when_every_rank_ended_well(run: Run) -> None:
    attempt = claim(run, processes=2, replay=False, steps=5)
    assert attempt is not None
    write_rows(run, START, END)
    status = ended(attempt, 0, 0)
    assert (status.state, status.step, status.reason) == (State.COMPLETED, 5, "")
    assert status.pids == [os.getpid()] * 2
    assert claim(run, processes=2, replay=False, steps=5) is None


START = {"kind": "start", "step": 0, "attempt": 1}
END = {"kind": "end", "step": 5, "weights_sha256": "0123456789abcdef" * 4}


def write_rows(run: Run, *rows: dict[str, object], torn: str = "") -> None:
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


@pytest.mark.parametrize(
    ("rows", "torn", "lacks"),
    [
        (None, "", "No such file"),
        ([], "", "it is empty"),
        ([START, step_row(1)], "", "the last row of metrics.jsonl is one of kind step, not the end"),
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
    attempt = claim(run, processes=2, replay=False, steps=5)
    assert attempt is not None
    if rows is not None:
        write_rows(run, *rows, torn=torn)
    status = ended(attempt, 0, 0)
    assert (status.state, status.cause) == (State.FAILED, Cause.ERROR)
    assert status.reason.startswith("its processes ended with exit code 0, but ")
    assert lacks in status.reason
    assert claim(run, processes=2, replay=False, steps=5) is not None


def test_metrics_that_are_removed_while_they_are_written_end_the_run(run: Run) -> None:
    metrics = MetricsFile(run)
    metrics.append(START)
    run.metrics_file.unlink()
    with pytest.raises(OSError, match="removed while the run writes it"):
        metrics.append(step_row(1))
    metrics.close()


def test_the_reason_is_the_first_cause_and_names_rank_and_signal(run: Run) -> None:
    attempt = claim(run, processes=3, replay=False, steps=5)
    assert attempt is not None
    attempt.rank_erred(0, ConnectionError("the other side\nis gone"))
    status = ended(attempt, 1, -9, 1)
    assert status.state == State.FAILED
    assert status.reason == "rank 1 was killed by SIGKILL (signal 9)"

    attempt = claim(run, processes=2, replay=False, steps=5)
    assert attempt is not None
    assert attempt.number == 2
    attempt.rank_erred(1, FloatingPointError("loss is not finite"))
    time.sleep(0.01)
    attempt.rank_erred(0, ConnectionError("the other side\nis gone"))
    # Rank 1 was aborted after its exception: what it said itself is the cause.
    assert ended(attempt, 1, -6).reason == "rank 1: FloatingPointError: loss is not finite"

    # Who says that another is gone may say so first.
    attempt = claim(run, processes=2, replay=False, steps=5)
    assert attempt is not None
    attempt.rank_erred(0, GoneError("rank 1 is gone: its process ended"))
    time.sleep(0.01)
    attempt.rank_erred(1, FloatingPointError("loss is not finite"))
    assert ended(attempt, 1, 1).reason == "rank 1: FloatingPointError: loss is not finite"

    attempt = claim(run, processes=2, replay=False, steps=5)
    assert attempt is not None
    run.log_file(attempt=4, rank=0).write_text("Traceback\nMemoryError: none left\n\n")
    assert "exit code 1: MemoryError: none left (logs/attempt-4-rank-0.log)" in ended(attempt, 1, 0).reason


class OutOfMemoryError(RuntimeError):
    """By the name of torch's, which a command that starts without torch knows it by."""


@pytest.mark.parametrize("kind", [MemoryError, OutOfMemoryError])
def test_a_rank_out_of_memory_is_the_cause_and_not_the_neighbour_it_took_with_it(
    run: Run, kind: type[Exception]
) -> None:
    attempt = claim(run, processes=3, replay=False, steps=1)
    assert attempt is not None
    # NCCL aborts the neighbour at once, and the rank itself ends with the interpreter.
    attempt.rank_ended(0, code=None, signal_number=6, stopped=False)
    attempt.rank_erred(2, ConnectionError("gone"))
    attempt.rank_ended(2, code=1, signal_number=None, stopped=False)
    attempt.rank_erred(1, kind("tried to allocate 2 GiB"))
    attempt.rank_ended(1, code=None, signal_number=6, stopped=False)
    status = run.status()
    assert status.cause == Cause.OUT_OF_MEMORY
    assert status.reason == f"rank 1: {kind.__name__}: tried to allocate 2 GiB"
    assert blamed_rank(attempt) == 1


def test_a_run_that_was_told_to_end_is_interrupted(run: Run) -> None:
    attempt = claim(run, processes=2, replay=False, steps=5)
    assert attempt is not None
    attempt.stop("Ctrl-C")
    attempt.stop("too late to be the reason")
    status = ended(attempt, -15, 1, stopped=True)
    assert (status.state, status.reason) == (State.INTERRUPTED, "Ctrl-C")
    assert claim(run, processes=2, replay=False, steps=5) is not None


def test_a_run_whose_processes_vanished_is_settled_by_whoever_looks(run: Run) -> None:
    attempt = claim(run, processes=1, replay=True, steps=5)
    assert attempt is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        attempt.rank_started(0, process_id(child.pid))
        assert settle(run).state == State.RUNNING
        child.kill()
    status = settle(run)
    assert (status.state, status.reason) == (
        State.FAILED,
        "rank 0 vanished: killed by SIGKILL, or its machine stopped",
    )
    with pytest.raises(RuntimeError, match="over"):
        enter(attempt, 0)


def test_a_rank_that_never_started_ends_the_attempt_once_nobody_can_start_it(run: Run) -> None:
    assert claim(run, processes=2, replay=False, steps=5) is not None
    assert settle(run).state == State.RUNNING
    status = settle(run, none_to_come=True)
    assert (status.state, status.reason) == (State.FAILED, "rank 0 never started")


def test_a_pid_that_is_used_again_is_another_process() -> None:
    me = this_process()
    assert not is_gone(me)
    assert is_gone(type(me)(host=me.host, pid=me.pid, start=me.start + 1))
    assert not is_gone(type(me)(host="elsewhere", pid=me.pid, start=me.start + 1))
