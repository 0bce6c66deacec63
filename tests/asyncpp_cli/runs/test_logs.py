"""`asyncpp logs`: the right one of a run's logs, and following it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.attempts import claimed, fall
from support.command_line import asyncpp, refusal, succeeded
from support.launches import ONE, Started, sweep, wait_for

from asyncpp_cli.launch.logs import log_to_show
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    succeeded("sweep", "quickstart", "--out", tmp_path / "e")
    return open_experiment(tmp_path / "e")


def begun(run: Run) -> Attempt:
    """A claimed attempt of two ranks, both of which are this process."""
    attempt = claimed(run, processes=2, replay=False, steps=5)
    for rank in range(2):
        attempt.record_start(rank, this_process())
        log(attempt, rank).write_text(f"attempt {attempt.number}, rank {rank} began\n")
    return attempt


def log(attempt: Attempt, rank: int) -> Path:
    return attempt.log_file(rank)


def end(attempt: Attempt, *codes: int) -> None:
    for rank, code in enumerate(codes):
        fall(attempt, rank, code)


def test_the_log_with_the_losses_is_that_of_the_last_stage_of_the_first_pipeline(tmp_path: Path) -> None:
    places = ("parallel.stages=2", "parallel.data=2", "schedule.microbatches=4")
    for neighbours, expected in (("data", 2), ("pipeline", 1)):
        folder = tmp_path / neighbours
        succeeded("sweep", "quickstart", *places, f"site.neighbours={neighbours}", "--out", folder)
        attempt = claimed(open_experiment(folder).runs[0], processes=4, replay=False, steps=5)
        for rank in range(4):
            log(attempt, rank).write_text(f"rank {rank}\n")
        shown = log_to_show(attempt.run, attempt=None, rank=None)
        assert shown is not None
        assert shown.rank == expected


@pytest.mark.slow
def test_the_log_of_the_rank_that_failed_first_in_the_last_attempt(experiment: Experiment) -> None:
    run = experiment.runs[0]
    first = begun(run)
    first.record_error(1, ValueError("its own fault"))
    end(first, 1, 1)
    second = begun(run)
    second.record_error(0, ValueError("this time it is rank 0"))
    time.sleep(0.01)
    second.record_error(1, ConnectionError("the other is gone"))
    end(second, 1, 1)

    shown = asyncpp("logs", experiment.folder, run.id)
    assert (shown.code, shown.output) == (0, "attempt 2, rank 0 began\n")
    assert shown.errors.startswith(f"{log(second, 0)} (also: attempt-1-rank-0.log, attempt-1-rank-1.log")
    other = asyncpp("logs", experiment.folder, run.id, "--rank", "1")
    assert other.output == "attempt 2, rank 1 began\n"
    before = asyncpp("logs", experiment.folder, run.id, "--attempt", "1")
    assert before.output == "attempt 1, rank 1 began\n"

    assert "no log (attempt 2, rank 7); there are: attempt 1 rank 0, " in refusal(
        "logs", experiment.folder, run.id, "--rank", "7"
    )


@pytest.mark.slow
def test_a_run_is_named_by_what_its_id_begins_with(experiment: Experiment) -> None:
    run = experiment.runs[0]
    end(begun(run), 0, 0)
    shown = asyncpp("logs", experiment.folder, run.id[:-4])
    # None failed: the last rank, which knows the loss.
    assert (shown.code, shown.output) == (0, "attempt 1, rank 1 began\n")
    for name in ("", "nothing"):
        refused = asyncpp("logs", experiment.folder, name)
        assert (refused.code, refused.errors.count("\n")) == (2, 1)
    assert "it has not begun" in refusal("logs", experiment.folder, experiment.runs[1].id)


@contextmanager
def followed(*run: str | Path, output: Path) -> Iterator[Started]:
    """`asyncpp logs -f` of a run. It does not outlive the block."""
    following = Started("logs", *run, "-f", output=output)
    try:
        yield following
    finally:
        following.process.kill()
        following.finish(seconds=60)


def wait_for_words(following: Started, words: str) -> None:
    wait_for(
        lambda: words in following.output + following.errors,
        seconds=60,
        why=lambda: following.output + following.errors,
    )


@pytest.fixture
def follower(experiment: Experiment, tmp_path: Path) -> Iterator[Started]:
    """Follows the first run, whose attempt has begun."""
    run = begun(experiment.runs[0]).run
    with followed(experiment.folder, run.id, output=tmp_path / "followed") as following:
        wait_for_words(following, "rank 1 began\n")
        yield following


def test_an_experiment_of_one_run_names_it(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *ONE)
    begun(experiment.runs[0])
    assert "began" in succeeded("logs", experiment.folder).output
    assert "has no checkpoint yet" in refusal("export", experiment.folder, "--out", tmp_path / "weights")


def test_a_run_whose_status_is_damaged_shows_its_latest_log(tmp_path: Path) -> None:
    [run] = sweep(tmp_path / "e", *ONE).runs
    for _ in range(2):
        end(begun(run), 1, 1)
    run.status_file.write_text("{")
    assert "attempt 2, rank 0 began" in succeeded("logs", run.folder).output


@pytest.mark.slow
def test_following_goes_on_to_the_end_of_the_run(follower: Started, experiment: Experiment) -> None:
    run = experiment.runs[0]
    attempt = Attempt(run, 1)
    with log(attempt, 1).open("a") as file:
        file.write("half a ")
        file.flush()
        wait_for_words(follower, "half a ")
        file.write("line, ünd more\n")
        file.flush()
        wait_for_words(follower, "line, ünd more\n")
        file.write("last words\n")
    attempt.record_error(0, ValueError("bad luck"))
    end(attempt, 1, 1)
    assert follower.finish(seconds=60) == 0
    assert follower.output == "attempt 1, rank 1 began\nhalf a line, ünd more\nlast words\n"
    said = follower.errors.splitlines()
    assert f"{run.id} is failed: rank 0: ValueError: bad luck" in said[-2]
    assert said[-1] == f"rank 0 failed first: {log(attempt, 0)}"


@pytest.mark.slow
def test_ctrl_c_leaves_quietly_and_the_run_be(follower: Started, experiment: Experiment) -> None:
    attempt = Attempt(experiment.runs[0], 1)
    follower.process.send_signal(signal.SIGINT)
    assert follower.finish(seconds=60) == 130
    assert len(follower.errors.splitlines()) == 1
    assert attempt.run.status().state == "running"
    end(attempt, 0, 0)


@pytest.mark.slow
def test_following_a_run_that_has_not_begun_waits_for_it(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "e", *ONE, "train.steps=2").folder
    with followed(folder / "2bw", output=tmp_path / "followed") as following:
        wait_for_words(following, "has not begun; waiting")
        succeeded("launch", folder / "2bw", "--replay")
        assert following.finish(seconds=100) == 0
    assert "step 2" in following.output
    assert "is completed" in following.errors
