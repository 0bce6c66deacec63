"""Mirrors of a run's metrics, read back with the trackers' own readers."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import succeeded
from support.launches import started_process, wait_for
from support.report_experiment import ExperimentFolder, metrics, settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.trackers.wandb import earlier_mirrors


def experiment(folder: Path, rows: list[dict[str, Any]]) -> Run:
    return ExperimentFolder(folder).add(settings("2bw", "adamw"), rows=rows)


def mirrored(tmp_path: Path, run: Run, *, folder: Path | None = None) -> EventAccumulator:
    """What TensorBoard reads of a run after `asyncpp mirror` into the folder `m`."""
    succeeded("mirror", folder or tmp_path / "e", "--to", "tensorboard", "--out", tmp_path / "m")
    return events(tmp_path / "m", run)


def events(mirror: Path, run: Run) -> EventAccumulator:
    read = EventAccumulator(str(mirror / run.id), size_guidance={"scalars": 0, "tensors": 0})
    return read.Reload()


def curve(read: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(point.step, pytest.approx(point.value)) for point in read.Scalars(tag)]


def resumed(after: int) -> list[dict[str, Any]]:
    """Rows of a second attempt that goes on after two of the steps, with other numbers."""
    start, *rows = metrics(val_losses=(9.0, 9.5))
    again = [row | {"train_loss": 7.0} if row["kind"] == "step" else row for row in rows]
    start |= {"attempt": 2, "step": after, "updates": after, "time": 1000.0}
    return [start, *(row for row in again if row.get("step", row.get("first_step", 0) + 1) > after)]


def test_tensorboard_reads_what_the_run_measured(tmp_path: Path) -> None:
    run = experiment(tmp_path / "e", metrics(val_losses=(4.0, 3.0), delay=1))
    done = succeeded("mirror", tmp_path / "e", "--to", "tensorboard")
    assert f"10 rows of 1 runs. Look at them: tensorboard --logdir {tmp_path}/e/tensorboard" in done.errors
    read = events(tmp_path / "e" / "tensorboard", run)
    assert curve(read, "train/loss") == [(step, 5 - step / 4) for step in (1, 2, 3, 4)]
    assert curve(read, "val/loss") == [(2, 4.0), (4, 3.0)]
    assert curve(read, "speed/tokens_per_second") == [(2, 500.0), (4, 1500.0)]
    assert curve(read, "speed/bubble") == [(2, 0.4), (4, 0.2)]
    assert curve(read, "staleness/delay") == [(2, 1), (4, 1)]
    assert [point.wall_time for point in read.Scalars("train/loss")] == [1.5, 3.0, 4.5, 6.0]
    [described] = read.Tensors("config.yaml/text_summary")
    assert "name: 2bw" in described.tensor_proto.string_val[0].decode()


def test_a_segment_of_one_update_has_no_bubble(tmp_path: Path) -> None:
    run = experiment(tmp_path / "e", metrics(steady=((1000, 2.0), (0, 0.0)), busy=((0.5, 0.7), (None, None))))
    read = mirrored(tmp_path, run)
    assert curve(read, "speed/bubble") == [(2, 0.4)]
    assert curve(read, "staleness/delay") == [(2, 0), (4, 0)]


def test_a_run_that_is_left_out_is_not_counted(tmp_path: Path) -> None:
    made = ExperimentFolder(tmp_path / "e")
    made.add(settings("2bw", "adamw"))
    rows = metrics()
    del rows[1]["tokens"]
    damaged = made.add(settings("1f1b", "adamw"), rows=rows)
    done = succeeded("mirror", tmp_path / "e", "--to", "tensorboard")
    assert f"left out: {damaged.metrics_file} has a malformed row" in done.errors
    assert "10 rows of 1 runs." in done.errors


def test_mirroring_again_adds_what_is_new_and_nothing_twice(tmp_path: Path) -> None:
    whole = metrics()
    run = experiment(tmp_path / "e", whole)
    lines = [json.dumps(row) + "\n" for row in whole]
    own = tmp_path / "m" / run.id / "notes.txt"
    own.parent.mkdir(parents=True)
    own.write_text("own")
    for count in (0, 1, 3, 3, len(lines)):
        # The last line is being written.
        run.metrics_file.write_text("".join(lines[:count]) + lines[-1][:10] * (count < len(lines)))
        steps = [row["step"] for row in whole[:count] if row["kind"] == "step"]
        read = mirrored(tmp_path, run, folder=run.folder)
        assert ("train/loss" in read.Tags()["scalars"]) == bool(steps)
        assert not steps or [step for step, _ in curve(read, "train/loss")] == steps
    assert own.read_text() == "own"


def test_rows_that_a_resumed_run_repeats_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of one second would be told apart by this number alone, and 10 sorts before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    run = experiment(tmp_path / "e", [*metrics(val_losses=(4.0, 3.0))[:-1], *resumed(after=2)])
    read = mirrored(tmp_path, run)
    assert curve(read, "train/loss") == [(1, 4.75), (2, 4.5), (3, 7.0), (4, 7.0)]
    assert curve(read, "val/loss") == [(2, 4.0), (4, 9.5)]
    # The second attempt began at 1000 with three seconds trained.
    assert [point.wall_time for point in read.Scalars("train/loss")] == [1.5, 3.0, 1001.5, 1003.0]


def test_a_curve_stands_at_updates_where_a_step_has_several(tmp_path: Path) -> None:
    rows = metrics()
    for row in rows:
        if row["kind"] == "step":
            row["tokens"] //= 2  # two updates per step: update 4 ends step 2
    rows = [row for row in rows if row["kind"] != "end" and row.get("first_step") != 2]
    run = experiment(tmp_path / "e", rows)
    read = mirrored(tmp_path, run)
    assert [step for step, _ in curve(read, "train/loss")] == [1, 2, 3, 4]
    assert curve(read, "val/loss")[0] == (4, 4.0)


@pytest.mark.slow
def test_following_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    whole = metrics()
    run = experiment(tmp_path / "e", whole[:1])
    mirrored = tmp_path / "m" / run.id
    words = ["mirror", tmp_path / "e", "--to", "tensorboard", "--follow", "--out", mirrored.parent]

    def losses() -> list[tuple[int, float]]:
        read = events(tmp_path / "m", run)
        return curve(read, "val/loss") if "val/loss" in read.Tags()["scalars"] else []

    patience = "import asyncpp_cli.commands.results.mirror as m; m.SECONDS_BETWEEN_UPDATES = 0.1\n"
    code = f"{patience}from asyncpp_cli.main import main; main()"
    command = [sys.executable, "-c", code, *words]
    with started_process(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: list(mirrored.glob("*.tfevents.*")), seconds=60)
        with run.metrics_file.open("a") as opened:
            opened.writelines(json.dumps(row) + "\n" for row in whole[1:])
        wait_for(lambda: losses() == [(2, 4.0), (4, 3.0)], seconds=60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, "Stopped" in errors) == (0, True)
    assert losses() == [(2, 4.0), (4, 3.0)]


def to_wandb(tmp_path: Path, name: str) -> None:
    """Mirror an experiment in a process of its own."""
    pytest.importorskip("wandb", reason="W&B is not among the packages that tests install")
    script = "from asyncpp_cli.main import main; main()"
    arguments = ["mirror", str(tmp_path / name), "--to", "wandb", "--out", str(tmp_path / "m")]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=240)


@pytest.mark.slow
def test_wandb_has_the_whole_run_once(tmp_path: Path) -> None:
    experiment(tmp_path / "e", [*metrics(val_losses=(4.0, 3.0))[:-1], *resumed(after=2)])
    for _ in range(2):
        to_wandb(tmp_path, "e")
    [kept] = (tmp_path / "m" / "wandb").glob("offline-run-*")
    [file] = kept.glob("*.wandb")
    assert history(file, "val/loss") == [(2, 4.0), (4, 9.5)]
    assert [value for _, value in history(file, "train/loss")] == [4.75, 4.5, 7.0, 7.0]


@pytest.mark.slow
def test_wandb_leaves_every_other_run_in_its_folder_alone(tmp_path: Path) -> None:
    for name, seeds in (("e", (0, 1, 2)), ("again", (0,))):
        folder = ExperimentFolder(tmp_path / name)
        for seed in seeds:
            folder.add(settings("2bw", "adamw", seed=seed), rows=metrics())
    foreign = tmp_path / "m" / "wandb" / "offline-run-20200101_000000-foreign"
    foreign.mkdir(parents=True)
    (foreign / "run-foreign.wandb").write_text("another's")
    for name in ("e", "e", "again"):
        to_wandb(tmp_path, name)
    # Three runs of one experiment, once each, and a run of the same id of another.
    kept = sorted(path.name.rpartition("-")[2] for path in foreign.parent.glob("offline-run-*"))
    assert (len(kept), len(set(kept))) == (5, 4)
    assert (foreign / "run-foreign.wandb").read_text() == "another's"


def test_only_mirrors_of_the_same_run_and_project_are_replaced(tmp_path: Path) -> None:
    def offline_run(name: str, mark: str | None) -> Path:
        folder = tmp_path / "wandb" / f"offline-run-{name}"
        folder.mkdir(parents=True)
        if mark is not None:
            (folder / "asyncpp.json").write_text(mark)
        return folder

    own = offline_run("20200101_000000-abc", '{"project": "p", "run": "r"}')
    unmarked = offline_run("20200101_000001-abc", None)
    offline_run("20200101_000002-abc", '{"project": "q", "run": "r"}')
    offline_run("20200101_000003-abc", "damaged")
    offline_run("20200101_000004-xabc", None)
    offline_run("20200101_000005-foreign", None)
    (tmp_path / "wandb" / "offline-run-20200101_000006-abc").symlink_to(own)
    assert set(earlier_mirrors(tmp_path, "abc", project="p")) == {own, unmarked}


def history(file: Path, tag: str) -> list[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for content in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        values = {
            item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        if tag in values:
            found.append((values["update"], values[tag]))
    return found


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of W&B's file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    assert content.startswith(b":W&B")
    place, block, record = 7, 32768, b""
    while place < len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
