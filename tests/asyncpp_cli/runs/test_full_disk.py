"""A rank that ends on a full disk, or on one that cannot be written to for a while."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
from support.attempts import claimed, fall
from support.command_line import ASYNCPP, asyncpp, ran, succeeded
from support.launches import LONG, ONE, started_process, sweep, wait_for
from support.privileges import disk, fill

from asyncpp_cli.launch.common import supervisor
from asyncpp_cli.launch.common.supervisor import Supervisor
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.recorder import RunRecorder
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.processes import is_gone, process_id, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause
from asyncpp_cli.tune.standing import RunRecord


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    with disk(tmp_path / "disk", megabytes=1) as folder:
        yield folder


@pytest.fixture
def run(small_disk: Path) -> Run:
    (run,) = sweep(small_disk / "e", *ONE).runs
    return run


def begin(run: Run) -> Attempt:
    return claimed(run, processes=1, replay=True, steps=3)


@pytest.mark.slow
def test_a_rank_of_a_job_that_cannot_even_begin_says_so_in_a_line(run: Run, small_disk: Path) -> None:
    attempt = begin(run)
    fill(small_disk)
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    job["SLURM_STEP_TASKS_PER_NODE"] = "1"
    module = "asyncpp_cli.launch.common.supervisor"
    ended = ran(sys.executable, "-m", module, run.folder, str(attempt.number), env=os.environ | job)
    assert ended.code != 0
    assert "cannot be written (No space left on device: free some space)" in ended.output
    assert "Traceback" not in ended.output + ended.errors


def test_a_rank_for_which_there_was_no_room_is_not_called_killed(run: Run, small_disk: Path) -> None:
    attempt = begin(run)
    with subprocess.Popen(["true"]) as child:
        attempt.record_start(0, process_id(child.pid))
    filled = fill(small_disk)
    fall(attempt, 0, 1)
    assert current_status(run).reason == "rank 0 ended without a record: no space is left on its disk"
    filled.unlink()


def test_a_rank_that_could_not_start_for_want_of_room_says_so(run: Run, small_disk: Path) -> None:
    attempt = begin(run)
    fill(small_disk)
    status = current_status(run, none_to_come=attempt.number)
    assert status.reason == "rank 0 never started: no space is left on its disk"


def test_a_rank_that_fails_on_a_full_disk_is_not_waited_for(
    run: Run, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written that tells the others: their supervisor knows it itself."""
    monkeypatch.setattr(supervisor, "_SECONDS_AFTER_ANOTHER", 0.0)
    attempt = claimed(run, processes=2, replay=False, steps=3)
    fill(small_disk)
    with subprocess.Popen(["false"]) as failed, subprocess.Popen(["sleep", "300"]) as waiting:
        children = {0: failed, 1: waiting}
        began = time.monotonic()
        Supervisor(attempt, children, size=2, grace=1.0, lease=100.0, received=[]).watch()
        assert time.monotonic() - began < 200


@pytest.mark.slow
def test_a_launch_that_is_told_to_end_on_a_full_disk_leaves_no_run(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", megabytes=20) as folder:
        (run,) = sweep(folder / "e", *LONG, "train.steps=100000", "train.checkpoint_interval=0").runs
        with started_process([*ASYNCPP, "launch", folder / "e", "--replay"]) as launching:
            wait_for(lambda: run.status().step > 0, seconds=100)
            [process] = Attempt(run, 1).processes(0)[:1]
            fill(folder)
            launching.terminate()
            assert launching.wait(timeout=100) == 130
            assert is_gone(process)


@pytest.mark.slow
def test_a_rank_that_ends_while_its_disk_is_read_only_is_not_called_killed(
    run: Run, small_disk: Path
) -> None:
    attempt = begin(run)
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]) as child:
        attempt.record_start(0, process_id(child.pid), this_process())
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        again = Timer(2.0, subprocess.run, [["mount", "-o", "remount,rw", small_disk]])
        again.start()
        Supervisor(attempt, {0: child}, size=1, grace=1.0, lease=100.0, received=[]).watch()
        again.join()
    assert current_status(run).reason.startswith("rank 0 ended with exit code 1")


def test_a_heartbeat_that_is_refused_does_not_end_a_run(run: Run, small_disk: Path) -> None:
    recorder = RunRecorder(run, attempt=begin(run).number)
    for step, mode in ((1, "ro"), (2, "rw")):
        subprocess.run(["mount", "-o", f"remount,{mode}", small_disk], check=True)
        time.sleep(RunRecorder._SECONDS_BETWEEN_HEARTBEATS)
        recorder.heartbeat(step, train_loss=1.0, tokens_per_second=1.0)
        assert run.status().step == (2 if mode == "rw" else 0)


@pytest.mark.slow
def test_a_run_whose_checkpoint_finds_no_room_goes_on_when_there_is_some(small_disk: Path) -> None:
    (run,) = sweep(small_disk / "e", *ONE, "model=micro").runs
    assert asyncpp("launch", small_disk / "e", "--replay").code == 1
    assert run.status().cause == Cause.NO_SPACE
    assert not RunRecord(id=run.id, status=run.status(), saved_step=None, losses={}).failed
    subprocess.run(["mount", "-o", "remount,size=40m", small_disk], check=True)
    succeeded("launch", small_disk / "e", "--replay")


@pytest.mark.slow
def test_shards_whose_checkpoint_finds_no_room_go_on_when_there_is_some(small_disk: Path) -> None:
    folder, matrix = small_disk / "e", ["matrix={schedule: fsdp, optimizer: adamw}", "exclude=[]"]
    (run,) = sweep(folder, *matrix, "train.steps=4", "train.checkpoint_interval=2").runs
    taken = small_disk / "taken"
    taken.write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**18))  # less than a checkpoint
    failed = asyncpp("launch", folder)
    assert (failed.code, run.saved_step) == (1, None)
    assert "space" in failed.errors
    taken.unlink()
    subprocess.run(["mount", "-o", "remount,size=40m", small_disk], check=True)
    succeeded("launch", folder)
    assert run.status().step == 4
