"""The files of a run: damaged and repeated rows of metrics, and a status that is replaced atomically."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attempts import claimed
from support.rows import plain, segment, step_row, typed

from asyncpp_cli.base.atomic_files import read_json, write_json
from asyncpp_cli.base.version import asyncpp_version, commit
from asyncpp_cli.runs.attempts.recorder import MetricsWriter, RunRecorder
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from stages.rows import End, Evaluation, Start


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def write(run: Run, *rows: dict[str, object]) -> None:
    writer = MetricsWriter(run)
    for row in rows:
        writer.append(typed(row))
    writer.close()


@given(cut=st.integers(min_value=0, max_value=200))
@settings(max_examples=60, deadline=None)
def test_a_torn_line_costs_itself_alone(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    write(run, {"kind": "start", "step": 0}, step_row(1), step_row(2))
    whole = run.metrics_file.read_bytes()
    cut = min(cut, len(whole))
    run.metrics_file.write_bytes(whole[:cut])
    kept = [json.loads(line) for line in whole[:cut].split(b"\n")[:-1]]
    last = whole[:cut].rpartition(b"\n")[2]
    if last in whole.split(b"\n") and last:
        kept.append(json.loads(last))  # only its line end is missing
    assert plain(run) == kept
    write(run, step_row(9))
    assert plain(run) == [*kept, step_row(9)]


def start_row(**values: int) -> dict[str, object]:
    return Start(**values).plain()


def test_steps_that_are_done_again_count_once(run: Run) -> None:
    rows = [
        start_row(step=0, attempt=1),
        step_row(1),
        segment(0, 2).plain(),
        step_row(2),
        segment(2, 2).plain(),
        step_row(3),
        Evaluation(step=3, tokens=24, val_loss=2.0, seconds=1.5).plain(),
        End(step=3).plain(),
        start_row(step=2, attempt=2),
        step_row(3),
    ]
    write(run, *rows)
    assert plain(run) == [*rows[:4], *rows[8:]]
    write(run, start_row(step=0, attempt=3))
    assert plain(run) == [start_row(step=0, attempt=3)]


def test_where_a_step_has_several_updates_a_resumed_run_drops_by_updates(run: Run) -> None:
    rows = [step_row(7), step_row(8), step_row(9), start_row(step=2, updates=8), step_row(9)]
    write(run, *rows)
    assert plain(run) == [*rows[:2], *rows[3:]]


def test_the_recorder_says_how_far_the_run_is_and_which_attempt_wrote(run: Run) -> None:
    attempt = claimed(run, processes=1, replay=True, steps=4)
    recorder = RunRecorder(run, attempt=attempt.number)
    recorder.append(Start(step=0, tokens_per_step=8))
    for step in (1, 2, 3):
        recorder.append(typed(step_row(step)))
        recorder.heartbeat(step, train_loss=1.0 / step, tokens_per_second=1.0)
    assert run.status().step == 1  # the later ones came too soon after it
    recorder.close()
    status = run.status()
    assert (status.state, status.step, status.steps, status.attempt) == (State.RUNNING, 3, 4, 1)
    assert (status.train_loss, status.tokens_per_second) == (1.0 / 3.0, 16.0)
    code = {"run": run.id, "asyncpp": asyncpp_version(), "commit": commit()}
    assert plain(run)[0] == start_row(step=0, tokens_per_step=8, attempt=1) | code
    # A replay says nothing of speed.
    recorder = RunRecorder(run, attempt=attempt.number)
    recorder.append(Start(step=0, tokens_per_step=8, replayed=True))
    recorder.append(typed(step_row(1)))
    recorder.heartbeat(1, train_loss=1.0, tokens_per_second=1.0)
    assert run.status().tokens_per_second is None
    recorder.close()
    assert (run.status().step, run.status().tokens_per_second) == (1, None)


def test_a_row_that_is_written_in_part_is_told_with_what_stops_it(run: Run) -> None:
    recorder = RunRecorder(run, attempt=claimed(run, processes=1, replay=True, steps=4).number)
    recorder.append(Start(step=0, tokens_per_step=8))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.metrics_file.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            recorder.append(typed(step_row(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(run.metrics_file)


@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda file: file.write_text(""),
        lambda file: os.truncate(file, file.stat().st_size // 2),
        lambda file: file.write_text(file.read_text() + file.read_text()),
    ],
    ids=["removed", "emptied", "halved", "doubled"],
)
def test_metrics_that_are_harmed_while_they_are_written_end_the_run(
    harm: Callable[[Path], object], run: Run
) -> None:
    metrics = MetricsWriter(run)
    metrics.append(Start(step=0, attempt=1))
    harm(run.metrics_file)
    with pytest.raises(OSError, match="removed, cut or written by others while the run writes it"):
        metrics.append(typed(step_row(1)))
    metrics.close()


@pytest.mark.slow
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


def test_json_files_keep_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_json(tmp_path / "file", {"a": 1})
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode
    assert read_json(tmp_path / "file", newest_format=1) == {"a": 1}
