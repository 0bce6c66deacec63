"""A supervisor looks at one place, however many ranks there are."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.attempts import claimed, fall

from asyncpp_cli.launch.common.supervisor import Supervisor
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import check_current, record_processes
from asyncpp_cli.runs.attempts.files import RankEnd
from asyncpp_cli.runs.attempts.settle import settle
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from stages.liveness.stop_signal import RESUMABLE, SIGNALS

SOON = 5.0
opened: list[str] | None = None


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event in ("open", "os.listdir", "os.scandir"):
        opened.append(str(arguments[0]))


sys.addaudithook(note)


@contextmanager
def opening() -> Iterator[list[str]]:
    global opened
    opened = []
    try:
        yield opened
    finally:
        opened = None


def attempt_of(folder: Path, ranks: int) -> Attempt:
    run = Run(folder)
    folder.mkdir(parents=True)
    attempt = claimed(run, processes=ranks, replay=False, steps=1)
    for rank in range(ranks):
        attempt.record_start(rank, this_process())
    return attempt


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains until its standard input is closed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


@pytest.fixture
def signals() -> Iterator[None]:
    """What a supervisor does with signals is forgotten after it."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def supervisor(attempt: Attempt, *ranks: int, size: int = 4) -> Supervisor:
    """Of ranks whose trainers still run."""
    return Supervisor(attempt, dict.fromkeys(ranks), size=size, grace=9.0, lease=60.0, received=[])


def seconds_left(watching: Supervisor) -> float | None:
    watching._polled = watching._polled_others = -math.inf
    return watching._seconds_left()


def long_ago(watching: Supervisor) -> None:
    """Seen, and a minute passes by the supervisor's own monotonic clock."""
    for early_exit in watching._attempt.early_exits:
        watching._exits_seen[early_exit.rank] = time.monotonic() - 60


def start(attempt: Attempt, ranks: int) -> None:
    attempt.record_start(ranks - 1, this_process())
    check_current(attempt)
    # Rank 0 knows all processes once they have met.
    record_processes(attempt, [this_process().pid] * ranks)


def look(attempt: Attempt, ranks: int) -> None:
    assert seconds_left(supervisor(attempt, *range(ranks), size=ranks)) is None


def end_of_the_last_but_one(attempt: Attempt, ranks: int) -> None:
    fall(attempt, ranks - 2, 0)


@pytest.mark.parametrize("what", [start, look, end_of_the_last_but_one])
def test_among_64_ranks_as_many_files_are_opened_as_among_4(
    what: Callable[[Attempt, int], None], tmp_path: Path
) -> None:
    counts = []
    for ranks in (4, 64):
        attempt = attempt_of(tmp_path / str(ranks), ranks)
        for rank in range(ranks - 2 if what is end_of_the_last_but_one else 0):
            attempt.write(RankEnd(code=0, signal=None, stopped=False, time=1.0), rank)
        with opening() as files:
            what(attempt, ranks)
        counts.append(sum(str(attempt.run.folder) in file for file in files))
        assert attempt.run.status().state == State.RUNNING
    assert 0 < counts[0] == counts[1] < 8


def test_polling_of_all_ranks_is_bounded_beyond_some_hundreds(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "run", 1)

    def looks_a_second(size: int) -> float:
        watching = supervisor(attempt, 0, size=size)
        return size * (1 / watching._poll_seconds + 4 / watching._others_poll_seconds)

    assert looks_a_second(64) == 64 * 8
    assert looks_a_second(4096) == looks_a_second(65536) == 2000


@pytest.mark.parametrize(
    ("code", "failed"), [(1, True), (-signal.SIGKILL, True), (RESUMABLE, False), (-signal.SIGTERM, False)]
)
@pytest.mark.parametrize("here", [True, False])
def test_a_rank_that_fell_long_ago_ends_the_others(
    code: int, failed: bool, here: bool, tmp_path: Path
) -> None:
    attempt = attempt_of(tmp_path / "run", 4)
    # On one machine all ranks have one supervisor, which knows that rank 2 has ended.
    itself, another = supervisor(attempt, 2), supervisor(attempt, *((0, 1, 3) if here else (0,)))
    fall(attempt, 2, code)
    assert seconds_left(another) is None
    assert another._another_failed(0) is failed
    assert not itself._another_failed(2)
    for watching in (another, itself):
        long_ago(watching)
    assert seconds_left(another) == SOON
    assert seconds_left(itself) is None


def test_a_rank_that_failed_is_told_of_after_many_that_were_ended(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "run", 8)
    for rank in range(4):
        fall(attempt, rank, RESUMABLE)
    assert not supervisor(attempt, 7, size=8)._another_failed(7)
    for rank in range(4, 8):
        attempt.record_error(rank, ValueError("loss is not finite"))
        fall(attempt, rank, 1)
    exits = [(early_exit.rank, early_exit.failed) for early_exit in attempt.early_exits]
    assert exits == [(0, False), (1, False), (4, True), (5, True)]
    for rank in range(8):  # who failed first sees that another has as well
        assert supervisor(attempt, rank, size=8)._another_failed(rank)


@pytest.mark.usefixtures("signals")
def test_a_rank_that_does_not_notice_is_ended_for_one_that_fell(
    tmp_path: Path, trainer: subprocess.Popen[bytes]
) -> None:
    attempt = attempt_of(tmp_path / "run", 2)
    with subprocess.Popen(["false"]) as fails:
        fails.wait()
        children = {0: fails, 1: trainer}
        attempt.record_early_exit(0, failed=True)
        watching = Supervisor(attempt, children, size=2, grace=9.0, lease=60.0, received=[])
        long_ago(watching)
        assert not watching.watch()
    ends = [attempt.read(RankEnd, rank) for rank in (0, 1)]
    assert [end and (end.code, end.signal, end.stopped) for end in ends] == [
        (1, None, False),
        (None, signal.SIGTERM, True),
    ]
    assert attempt.run.status().state == State.FAILED
    assert attempt.run.status().reason.startswith("rank 0 ended with exit code 1")


def test_a_file_that_is_damaged_ends_nobody(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path / "run", 4)
    for content in ('{"fallen": [{"rank": 1}]}', '{"fallen": 3}', "["):
        (attempt.folder / "fallen.json").write_text(content)
        assert attempt.early_exits == ()
        assert seconds_left(supervisor(attempt, 3)) is None
    assert settle(attempt.run).state == State.RUNNING
