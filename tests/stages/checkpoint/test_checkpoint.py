"""Checkpoints on the disk: written whole or not at all, and no damaged one is ever used."""

from __future__ import annotations

import pickle
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.resumed import check_resumed, go_back, json_of, saving, seal, wait_for_saving
from support.small_runs import Rows, in_processes, replayed, small_config
from support.training_cases import measured

from stages.checkpoint import files
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.saved_weights import newest_weights
from stages.comm.process import Process
from stages.config.records import encoded
from stages.config.run_config import RunConfig, ScheduleConfig
from stages.rows import Row, Step
from stages.trainer import replay, train


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


class Saved(NamedTuple):
    config: RunConfig
    folder: Path
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A finished run with checkpoints of steps 2 and 4, the last of its steps."""
    folder = tmp_path_factory.mktemp("finished") / "c"
    config = saving(small_config("2bw", optimizer="muon", coefficient=1.0))
    return Saved(config, folder, measured(replayed(config, checkpoints=folder)))


@pytest.fixture
def saved(finished: Saved, tmp_path: Path) -> Saved:
    """A copy of the finished run for one test."""
    shutil.copytree(finished.folder, tmp_path / "c")
    return finished._replace(folder=tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("rank-0.safetensors", flip),
        ("rank-0.safetensors", Path.unlink),
        ("index.json", cut_short),
        ("manifest.json", flip),
    ],
)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(
    name: str, harm: Any, saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder, whole = saved
    harm(folder / "step-4" / name)
    with pytest.raises(CheckpointError):
        newest_weights(folder, config, step=4)
    assert newest_weights(folder, config).step == 2
    rows = replayed(config, checkpoints=folder)
    check_resumed(whole, measured(rows), step=2)
    warning = capsys.readouterr().err
    assert "step-4 is not used: " in warning
    # A bit of the manifest may be in another file's entry.
    assert name in warning or name == "manifest.json"
    # It has been written anew.
    rows = replayed(config, checkpoints=folder)
    check_resumed(whole, measured(rows), step=4)
    assert files.saved_steps(folder) == [4, 2]
    assert {entry.name for entry in folder.iterdir()} == {"step-2", "step-4"}


@pytest.mark.slow
def test_without_a_valid_checkpoint_a_run_starts_anew(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder, whole = saved
    for step in (2, 4):
        cut_short(folder / f"step-{step}" / "rank-0.safetensors")
    rows = replayed(config, checkpoints=folder)
    assert measured(rows)[1:] == whole[1:]
    assert capsys.readouterr().err.count("is not used") == 2


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harm-was-done"),)


@pytest.mark.parametrize("name", ["index.json", "rank-0.safetensors"])
def test_a_checkpoint_is_data(
    name: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that would run code where it is unpickled is refused, with a manifest that matches it."""
    config, folder, _ = saved
    monkeypatch.chdir(tmp_path)
    for step in (2, 4):
        (folder / f"step-{step}" / name).write_bytes(pickle.dumps(Harmful()))
        seal(folder / f"step-{step}")
    with pytest.raises(CheckpointError, match=f"no checkpoint fits this run .*{name} "):
        replay(config, recorder=Rows(), checkpoints=folder)
    assert not Path("harm-was-done").exists()


def test_a_checkpoint_of_another_format_is_refused(saved: Saved) -> None:
    config, folder, _ = saved
    manifest = folder / "step-4" / "manifest.json"
    manifest.write_bytes(encoded(json_of(manifest) | {"format": 1}))
    with pytest.raises(CheckpointError, match=r"step-4 .* has format 1, this asyncpp reads"):
        replay(config, recorder=Rows(), checkpoints=folder)


def test_a_checkpoint_of_another_run_is_refused(saved: Saved) -> None:
    config, folder, _ = saved
    wider = replace(config, model=replace(config.model, mlp_width=32))
    slower = replace(config, schedule=ScheduleConfig(name="2bw", microbatches=2, delay=2))
    for other, words in ((wider, "was saved as"), (slower, r"version/2/.* is not in it")):
        with pytest.raises(CheckpointError, match=words):
            replay(other, recorder=Rows(), checkpoints=folder)


@pytest.mark.slow
def test_the_newest_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    leftover = files.unfinished_folder(folder, 1)
    leftover.mkdir(parents=True)
    (leftover / "rank-0.safetensors").write_bytes(b"half of one")
    replay(saving(small_config(steps=7), interval=2, keep=3), recorder=Rows(), checkpoints=folder)
    assert {entry.name for entry in folder.iterdir()} == {"step-4", "step-6", "step-7"}
    replay(saving(small_config(steps=7), interval=0), recorder=Rows(), checkpoints=tmp_path / "d")
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
    """Nothing larger than `size` bytes can be written after step 3, when the checkpoint of step 2 is; step 5
    waits for that of step 4."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def append(self, row: Row) -> None:
        super().append(row)
        if isinstance(row, Step) and row.step in (3, 5):
            wait_for_saving()
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, resource.RLIM_INFINITY))


FULL = r"step 4 could not be written .*File too large.* valid one is of step 2"
"""With the system's reason: torch's ZIP writer says "unexpected pos" on top of it."""


@pytest.mark.parametrize("size", [0, 100_000])
@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(size: int, tmp_path: Path) -> None:
    config, whole, rows = saving(small_config("2bw")), Rows(), Rows()
    replay(config, recorder=whole)
    folder = tmp_path / "c"
    with largest_file(resource.RLIM_INFINITY), pytest.raises(CheckpointError, match=FULL):
        replay(config, recorder=FillsTheDisk(size), checkpoints=folder)
    assert {entry.name for entry in folder.iterdir()} == {"step-2"}
    replay(config, recorder=rows, checkpoints=folder)
    check_resumed(measured(whole), measured(rows), step=2)


def fill_the_disk(process: Process, given: tuple[RunConfig, Path]) -> tuple[str, list[int]]:
    """How a run ends of which one rank cannot write, and the steps that it did."""
    config, folder = given
    rows = FillsTheDisk(3000)
    with largest_file(resource.RLIM_INFINITY), pytest.raises(CheckpointError) as ended:
        train(config, process=process, recorder=rows, checkpoints=folder)
    return str(ended.value), [row["step"] for row in rows.of_kind("step")]


@pytest.mark.slow
def test_a_full_disk_of_one_rank_ends_all_before_the_next_drain(tmp_path: Path) -> None:
    config = saving(small_config("2bw", steps=40, eval_interval=4), interval=2)
    first = replace(config, train=replace(config.train, steps=2))
    replay(first, recorder=Rows(), checkpoints=tmp_path / "c")
    config = saving(replace(config, train=replace(config.train, eval_interval=40)), interval=4)
    ends = in_processes(fill_the_disk, [(config, tmp_path / "c")], size=2)
    ((reason, _),), ((same, steps),) = ends
    assert reason == same
    assert re.search(FULL, reason)
    assert "rank 1: " in reason
    assert 5 <= steps[-1] < 8
    assert {entry.name for entry in (tmp_path / "c").iterdir()} == {"step-2"}


class WritesWhileTraining(Rows):
    """The first checkpoint is not done before a step has been trained that comes after it."""

    def __init__(self, *, after: int) -> None:
        super().__init__()
        self._after = after
        self._trained = threading.Event()

    def append(self, row: Row) -> None:
        super().append(row)
        if isinstance(row, Step) and row.step > self._after:
            self._trained.set()

    def flush(self) -> None:
        if not self._trained.wait(20):
            raise OSError("training waits for the checkpoint to be written")


@pytest.mark.slow
def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    config = saving(small_config("2bw", steps=6, optimizer="muon", coefficient=1.0))
    whole, rows = replayed(config), WritesWhileTraining(after=2)
    replay(config, recorder=rows, checkpoints=tmp_path / "c")
    assert measured(rows)[1:] == measured(whole)[1:]
    go_back(tmp_path / "c", 2)
    resumed = replayed(config, checkpoints=tmp_path / "c")
    check_resumed(measured(whole), measured(resumed), step=2)


def test_a_folder_that_cannot_be_made_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file in the way")
    with pytest.raises((CheckpointError, OSError), match="c"):
        replay(saving(small_config()), recorder=Rows(), checkpoints=tmp_path / "c")
