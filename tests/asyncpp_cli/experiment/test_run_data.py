"""What a run trains on: the same for every attempt and every seed, wherever it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.command_line import asyncpp, succeeded
from support.files import ROOT

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.experiment.run_data import locations
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.status import State

TEXTS = ROOT / "tests" / "support" / "prose"

TEMPLATE = """
matrix: {schedule: [1f1b], optimizer: [sgd], seed: [0, 1]}
model: micro
schedule.microbatches: 2
data: {path: texts, context: 16, validation_share: 0.3}
train: {steps: 2, microbatch_size: 2, eval_microbatches: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None) -> Path:
    """A folder to type commands in, with a template and its texts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TEXTS, tmp_path / "texts")
    (tmp_path / "mine.yaml").write_text(TEMPLATE)
    return tmp_path


def ids(experiment: Path) -> list[str]:
    return [cell.id for cell in open_experiment(experiment).cells]


def states(experiment: Path) -> list[State]:
    return [run.status().state for run in open_experiment(experiment).runs]


def train(experiment: Path) -> None:
    """Train what is not completed, one run after the other in this process."""
    for run in open_experiment(experiment).runs:
        if run.status().state != State.COMPLETED:
            succeeded("train", run.folder, "--replay")


def refused(*arguments: str | Path) -> str:
    ended = asyncpp(*arguments)
    assert ended.code == 2, ended
    assert ended.errors.count("\n") == 1
    return ended.errors


@pytest.mark.slow
def test_the_same_data_elsewhere_makes_the_same_runs(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "a")
    shutil.copytree("texts", "elsewhere/other-name")
    succeeded("sweep", "mine.yaml", "data.path=elsewhere/other-name", "--out", "b")
    assert ids(Path("a")) == ids(Path("b"))
    (folder / "elsewhere" / "other-name" / "0.txt").write_text("other words " * 99)
    succeeded("sweep", "mine.yaml", "data.path=elsewhere/other-name", "--out", "c")
    assert not set(ids(Path("a"))) & set(ids(Path("c")))


@pytest.mark.slow
def test_moved_data_is_found_where_the_user_says_it_went(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "e")
    shutil.move("texts", "new-place")
    assert "texts does not exist" in refused("launch", "e", "--replay")
    (folder / "wrong").mkdir()
    (folder / "wrong" / "0.txt").write_text("other words " * 99)
    assert "holds other data" in refused("data", "moved", "e", "wrong")
    ended = succeeded("data", "moved", "e", "new-place")
    assert "2 runs" in ended.errors + ended.output
    train(Path("e"))
    assert states(Path("e")) == [State.COMPLETED] * 2


@pytest.mark.slow
def test_sweeping_again_with_the_new_place_says_so_too(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "matrix.data.path=[texts]", "--out", "e")
    before = ids(Path("e"))
    shutil.move("texts", "new-place")
    changes = ["matrix.data.path=[new-place]", "matrix.seed=[0,1,2]"]
    ended = succeeded("sweep", "mine.yaml", *changes, "--out", "e")
    assert "1 runs added to the 2" in ended.errors + ended.output
    assert ids(Path("e"))[:2] == before
    train(Path("e"))
    assert states(Path("e")) == [State.COMPLETED] * 3


@pytest.mark.slow
def test_changed_data_is_refused_by_a_launch_a_resumed_run_and_another_seed(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "matrix.seed=[0]", "--out", "e")
    [run] = open_experiment(Path("e")).runs
    held = (folder / "texts" / "0.txt").read_text()
    (folder / "texts" / "0.txt").write_text(held.replace("pipeline", "Pipeline"))
    for command in (["launch", "e", "--replay"], ["train", run.folder, "--replay"]):
        said = refused(*command)
        assert "texts holds other data than the run was made for" in said
    assert run.status().state == State.PENDING
    said = refused("sweep", "mine.yaml", "matrix.seed=[0,1]", "--out", "e")
    assert "has changed since the runs of e were made" in said
    assert ids(Path("e")) == [run.id]
    (folder / "texts" / "0.txt").write_text(held)
    train(Path("e"))


@pytest.mark.slow
def test_a_run_without_a_cache_splits_its_text_in_its_own_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("no folder")
    monkeypatch.setenv("ASYNCPP_CACHE", str(folder / "file" / "cache"))
    succeeded("sweep", "mine.yaml", "matrix.seed=[0]", "--out", "e")
    train(Path("e"))
    [run] = open_experiment(Path("e")).runs
    assert run.status().state == State.COMPLETED
    assert len(list((run.folder / "text").glob("bytes-*/manifest.json"))) == 1


@pytest.mark.slow
def test_the_report_names_the_data(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "e")
    train(Path("e"))
    data = open_experiment(Path("e")).runs[0].config().data
    assert data.sha256 is not None
    assert f"Data: SHA-256 {data.sha256}" in asyncpp("report", "e", "--format", "markdown").output
    [cell] = json.loads(asyncpp("report", "e", "--format", "json").output)
    assert cell["conditions"]["corpus_sha256"] == data.sha256


@pytest.mark.slow
def test_another_python_is_refused_but_has_the_same_ids(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["data.path=null", "matrix.seed=[0]"]
    succeeded("sweep", "mine.yaml", *changes, "--out", "e")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder / "texts"))
    for file in (folder / "texts").iterdir():
        file.rename(file.with_suffix(".py"))
    assert "holds other data than the run was made for" in refused("launch", "e", "--replay")
    changes[1] = "matrix.seed=[0,1]"
    assert "another Python?" in refused("sweep", "mine.yaml", *changes, "--out", "e")
    succeeded("sweep", "mine.yaml", *changes, "--out", "f")
    assert ids(Path("f"))[0] == ids(Path("e"))[0]


@pytest.mark.parametrize(
    "content", ['{"moved": 3}', '{"moved": {"texts": 3}}', "{", '{"format": 2, "moved": {}}']
)
def test_a_damaged_file_of_locations_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(DamagedError, match=r"data\.json"):
        locations(tmp_path)
    assert locations(tmp_path / "none") == {}


@pytest.mark.slow
def test_the_type_of_tokens_is_no_part_of_an_id_but_what_they_are(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 4000)
    for dtype in ("<u2", "<u4"):
        tokens.astype(dtype).tofile(f"{dtype[1:]}.bin")
    shutil.copy("u4.bin", "other.bin")
    assert "accepted: data.dtype: uint32" in refused("sweep", "mine.yaml", "data.path=u4.bin", "--out", "c")
    for out, path, options in (
        ("a", "u2.bin", []),
        ("b", "u2.bin", ["data.dtype=uint16"]),
        ("c", "u4.bin", ["data.dtype=uint32", "data.validation.other=other.bin"]),
    ):
        succeeded("sweep", "mine.yaml", "matrix.seed=[0]", f"data.path={path}", *options, "--out", out)
    assert ids(Path("a")) == ids(Path("b"))
    shutil.move("u4.bin", "moved.bin")
    assert "1 runs" in succeeded("data", "moved", "c", "moved.bin").errors
    assert "3,800" in succeeded("data", "inspect", "moved.bin", "--dtype", "uint32").output
    assert "accepted: auto, uint8" in refused("data", "inspect", "moved.bin", "--dtype", "uint64")
