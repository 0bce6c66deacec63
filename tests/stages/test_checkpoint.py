"""Checkpoints: a run that goes on from one computes the same bits, and no damaged one is ever used."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import Rows, in_processes, small_config
from test_distributed import cases, measured

from optimizers import NAMES
from stages import checkpoint_files as files
from stages.check import CORRECTIONS as CARRIED
from stages.check import ConfigError, check
from stages.checkpoint_files import CheckpointError
from stages.config import CorrectionConfig, ParallelConfig, RunConfig, ScheduleConfig
from stages.process import Process
from stages.run import RunResult
from stages.trainer import replay, train
from stages.watchdog import watching


def saving(config: RunConfig, *, interval: int = 2, keep: int = 9) -> RunConfig:
    return replace(
        config,
        train=replace(config.train, checkpoint_interval=interval),
        site=replace(config.site, keep_checkpoints=keep),
    )


def go_back(folder: Path, step: int) -> None:
    """Leave what a run that was killed after the checkpoint of `step` would have left."""
    for later in files.saved_steps(folder):
        if later > step:
            shutil.rmtree(files.folder_of(folder, later))


def after(rows: list[dict[str, Any]], *, step: int, updates: int) -> list[dict[str, Any]]:
    """The rows that a run resumed after `step` writes again, but for its `start` row."""
    kept = []
    for row in rows:
        done = {
            "start": -1,
            "segment": row.get("first_step", 0) - step + 1,
            "step": row.get("step", 0) - updates,
            "eval": row.get("step", 0) - step,
            "end": 1,
        }
        if done[row["kind"]] > 0:
            kept.append(row)
    return kept


def check_resumed(whole: list[dict[str, Any]], resumed: list[dict[str, Any]], *, step: int) -> None:
    start, *rest = resumed
    assert (start["kind"], start["step"]) == ("start", step)
    assert rest == after(whole, step=step, updates=start["updates"])
    assert rest[-1]["weights_sha256"]


def replay_twice(config: RunConfig, folder: Path, *, step: int) -> None:
    """Run to the end, then from the checkpoint of `step` again: the same bits."""
    whole, resumed = Rows(), Rows()
    replay(config, recorder=whole, checkpoints=folder)
    go_back(folder, step)
    replay(config, recorder=resumed, checkpoints=folder)
    check_resumed(measured(whole), measured(resumed), step=step)


@pytest.mark.parametrize("correction", ["none", "error-feedback", "buffered", "decay-at-x", *CARRIED[1:]])
def test_every_optimizer_goes_on_to_the_same_bits(correction: str, text: Path, tmp_path: Path) -> None:
    schedule = {"discrepancy": "paci", "delay-compensation": "2bw"}.get(correction, "pipedream")
    refused = []
    for name in NAMES:
        config = saving(small_config(schedule, text=text, optimizer=name, clip="stage", layers=2, stages=2))
        config.schedule.update_interval = None if schedule == "2bw" else 2
        if correction in CARRIED:
            config.correction = CorrectionConfig(name=correction)
            config.correction.sync_steps = 1 if correction == "sync-start" else None
        else:
            config.error_feedback.coefficient = 1.0
            config.error_feedback.form = "look-ahead" if correction == "error-feedback" else "buffered"
            config.error_feedback.decay_at = "x" if correction == "decay-at-x" else "y"
        try:
            check(config)
        except ConfigError as error:
            refused.append(str(error))
            continue
        replay_twice(config, tmp_path / name, step=2)
    assert not refused


def resume_here(process: Process, given: tuple[RunConfig, Path]) -> list[list[dict[str, Any]]]:
    """Train to the end, then again from step 2; the rows of both."""
    config, folder = given
    whole, resumed = Rows(), Rows()
    train(config, process=process, recorder=whole, checkpoints=folder)
    process.gather(None)
    if process.rank == 0:
        go_back(folder, 2)
    process.gather(None)
    train(config, process=process, recorder=resumed, checkpoints=folder)
    return [measured(whole), measured(resumed)]


def test_every_schedule_goes_on_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    """In processes; then the checkpoint that these wrote in replay."""
    given = [(saving(config), tmp_path / str(n)) for n, config in enumerate(cases(text, stages=2))]
    by_rank = in_processes(resume_here, given, size=2)
    for (config, folder), (whole, resumed) in zip(given, by_rank[-1], strict=True):
        check_resumed(whole, resumed, step=2)
        go_back(folder, 2)
        rows = Rows()
        replay(config, recorder=rows, checkpoints=folder)
        check_resumed(whole, measured(rows), step=2)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("form", ["look-ahead", "buffered"])
def test_a_run_goes_on_with_another_number_of_stages(
    stages: int, optimizer: str, form: str, text: Path, tmp_path: Path
) -> None:
    config = saving(
        small_config(
            "2bw", text=text, microbatches=4, optimizer=optimizer, coefficient=1.0, form=form, steps=8
        ),
        interval=4,
    )
    whole = replay(config, recorder=Rows(), checkpoints=tmp_path / "c")
    go_back(tmp_path / "c", 4)
    other = replace(config, parallel=ParallelConfig(stages=stages))
    resumed = replay(other, recorder=Rows(), checkpoints=tmp_path / "c")
    assert resumed.train_losses == pytest.approx(whole.train_losses[4:], rel=1e-6)
    assert resumed.val_losses == pytest.approx(whole.val_losses[-2:], rel=1e-6)


def test_bfloat16_replicas_come_back(text: Path, tmp_path: Path) -> None:
    replay_twice(
        saving(small_config("2bw", text=text, precision="bfloat16", coefficient=0.5)), tmp_path / "c", step=2
    )


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.fixture
def saved(text: Path, tmp_path: Path) -> tuple[RunConfig, Path, list[dict[str, Any]]]:
    """A finished run with checkpoints of steps 2 and 4, the last of its steps."""
    config, rows = saving(small_config("2bw", text=text, optimizer="muon", coefficient=1.0)), Rows()
    replay(config, recorder=rows, checkpoints=tmp_path / "c")
    return config, tmp_path / "c", measured(rows)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, cut_short, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over(
    name: str,
    harm: Any,
    saved: tuple[RunConfig, Path, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, folder, whole = saved
    harm(folder / "step-4" / name)
    if (name, harm) == ("manifest.json", cut_short):
        # Its last byte ends the line: nothing is lost with it.
        (folder / "step-4" / name).write_bytes((folder / "step-4" / name).read_bytes()[:-1])
    rows = Rows()
    replay(config, recorder=rows, checkpoints=folder)
    check_resumed(whole, measured(rows), step=2)
    warning = capsys.readouterr().err
    assert "step-4 is not used: " in warning
    # A bit of the manifest may be in another file's entry.
    assert name in warning or (name, harm) == ("manifest.json", flip)
    # It has been written anew.
    rows = Rows()
    replay(config, recorder=rows, checkpoints=folder)
    check_resumed(whole, measured(rows), step=4)
    assert files.saved_steps(folder) == [4, 2]
    assert {entry.name for entry in folder.iterdir()} == {"step-2", "step-4"}


def test_without_a_valid_checkpoint_a_run_starts_anew(
    saved: tuple[RunConfig, Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder, whole = saved
    for step in (2, 4):
        cut_short(folder / f"step-{step}" / "__0_0.distcp")
    rows = Rows()
    replay(config, recorder=rows, checkpoints=folder)
    assert measured(rows)[1:] == whole[1:]
    assert capsys.readouterr().err.count("is not used") == 2


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harm-was-done"),)


def test_a_checkpoint_is_data(
    saved: tuple[RunConfig, Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description that would run code is refused, with a manifest that matches it."""
    config, folder, _ = saved
    monkeypatch.chdir(tmp_path)
    description = folder / "step-4" / ".metadata"
    description.write_bytes(pickle.dumps(Harmful()))
    manifest = folder / "step-4" / "manifest.json"
    content = json.loads(manifest.read_bytes())
    content["files"][".metadata"] = files.digest(description)
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        replay(config, recorder=Rows(), checkpoints=folder)
    assert not Path("harm-was-done").exists()


def test_a_checkpoint_of_another_run_is_refused(
    saved: tuple[RunConfig, Path, list[dict[str, Any]]],
) -> None:
    config, folder, _ = saved
    wider = replace(config, model=replace(config.model, mlp_width=32))
    slower = replace(config, schedule=ScheduleConfig(name="2bw", microbatches=2, delay=2))
    for other, words in ((wider, "was saved as"), (slower, r"version/2/.* is not in it")):
        with pytest.raises(CheckpointError, match=words):
            replay(other, recorder=Rows(), checkpoints=folder)


def test_the_newest_are_kept_and_leftovers_removed(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    leftover = files.unfinished_folder(folder, 1)
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half of one")
    replay(saving(small_config(text=text, steps=7), interval=2, keep=3), recorder=Rows(), checkpoints=folder)
    assert {entry.name for entry in folder.iterdir()} == {"step-4", "step-6", "step-7"}
    replay(saving(small_config(text=text, steps=7), interval=0), recorder=Rows(), checkpoints=tmp_path / "d")
    assert {entry.name for entry in (tmp_path / "d").iterdir()} == {"step-7"}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FillsTheDisk(Rows):
    """Nothing larger than `size` bytes can be written after step 3."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def append(self, row: Any) -> None:
        super().append(row)
        if row["kind"] == "step" and row["step"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("size", [0, 3000, 100_000])
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    size: int, text: Path, tmp_path: Path
) -> None:
    config, whole, rows = saving(small_config("2bw", text=text)), Rows(), Rows()
    replay(config, recorder=whole)
    folder = tmp_path / "c"
    with (
        largest_file(resource.RLIM_INFINITY),
        pytest.raises(CheckpointError, match=r"step 4 could not be written .* valid one is of step 2"),
    ):
        replay(config, recorder=FillsTheDisk(size), checkpoints=folder)
    assert {entry.name for entry in folder.iterdir()} == {"step-2"}
    replay(config, recorder=rows, checkpoints=folder)
    check_resumed(measured(whole), measured(rows), step=2)


def test_a_folder_that_cannot_be_made_ends_the_run(text: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file in the way")
    with pytest.raises((CheckpointError, OSError), match="c"):
        replay(saving(small_config(text=text)), recorder=Rows(), checkpoints=tmp_path / "c")


class AfterCalls:
    """Says that the run is to end from the nth time on that it is asked."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize("asked", [0, 9])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("interleaved-1f1b", {"chunks": 2}),
        ("2bw", {"coefficient": 1.0}),
        ("2bw", {"stages": 4, "microbatches": 4}),
        ("paci", {"clip": "stage"}),
        ("pipedream", {"clip": "stage", "update_interval": 1}),
    ],
)
def test_a_run_that_is_told_to_end_goes_on_to_the_same_bits(
    schedule: str, options: dict[str, Any], asked: int, text: Path, tmp_path: Path
) -> None:
    config = saving(small_config(schedule, text=text, steps=9, eval_interval=4, **options), interval=4)
    whole = Rows()
    replay(config, recorder=whole)
    rows, stops = Rows(), []
    ended: RunResult | None = None
    for calls in (asked, 2, 10**6):
        ended = replay(config, recorder=rows, checkpoints=tmp_path / "c", stop=AfterCalls(calls))
        stops.append(ended.stopped_at)
        if ended.stopped_at is None:
            break
        assert files.saved_steps(tmp_path / "c")[0] == ended.stopped_at
    assert ended is not None
    assert ended.stopped_at is None
    if config.train.clip == "global" and asked == 0:
        assert stops[0] is not None
        assert stops[0] < 4, "it did not wait for the next drain"
    for kind in ("step", "eval", "end"):
        assert [row for row in measured(rows) if row["kind"] == kind] == [
            row for row in measured(whole) if row["kind"] == kind
        ]


def test_a_standstill_is_noticed_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    began = time.perf_counter()
    with watching(lambda: began, limit=0.2, on_stall=told.append):
        deadline = began + 5
        while not told and time.perf_counter() < deadline:
            time.sleep(0.01)
    assert told
    assert "nothing new was begun" in told[0]
    assert "test_a_standstill_is_noticed_and_shown" in capfd.readouterr().err

    told.clear()
    with watching(time.perf_counter, limit=0.2, on_stall=told.append):
        time.sleep(0.5)
    assert not told


def test_a_run_that_stands_still_in_a_segment_is_noticed(
    text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noticed = threading.Event()

    class Stuck(Rows):
        def append(self, row: Any) -> None:
            super().append(row)
            if row["kind"] == "step" and row["step"] == 2:
                assert noticed.wait(10)

    config = small_config("2bw", text=text)
    config.site.timeout = 0.3
    replay(config, recorder=Stuck(), on_stall=lambda message: noticed.set())
    assert "in append" in capfd.readouterr().err
