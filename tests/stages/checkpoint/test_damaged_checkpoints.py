"""Checkpoints that were damaged, or made up with a manifest that agrees: one line each, and nothing is read
that is not of the checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.json_values import JSON, parts_of, replace_part
from support.resumed import json_of, seal
from support.small_runs import Rows, replayed, small_config

from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.saved_weights import newest_weights
from stages.config.records import encoded
from stages.config.run_config import RunConfig, changed
from stages.trainer import replay

STEP = 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(Path(__file__).read_text())
    config = small_config("2bw", text=folder / "text.txt", steps=STEP, coefficient=1.0)
    config = changed(config, {"train.ema_decay": 0.5})
    replay(config, recorder=Rows(), checkpoints=folder / "c")
    return config, folder / "c"


@contextmanager
def copy_of(checkpoints: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "c"
        shutil.copytree(checkpoints, copy)
        yield copy


def use(config: RunConfig, checkpoints: Path) -> None:
    """What `export` does."""
    saved = newest_weights(checkpoints, config)
    with tempfile.TemporaryDirectory() as folder:
        for weights in Weights:
            write_weights(saved, config, Path(folder), format=ExportFormat.HF, weights=weights)


def one_line(config: RunConfig, checkpoints: Path) -> str:
    """What `export` says of a checkpoint that it cannot use; empty if it can."""
    said = ""
    try:
        use(config, checkpoints)
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000
    return said


def test_an_undamaged_one_is_used(trained: tuple[RunConfig, Path]) -> None:
    assert one_line(*trained) == ""


NAMES = ("../secret", "/etc/passwd", "a/b", ".", "..", "", "a\0b", "manifest.json")


@pytest.mark.parametrize("name", [None, *NAMES], ids=ascii)
def test_a_manifest_lists_files_of_its_folder(
    name: str | None, trained: tuple[RunConfig, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """And some."""
    config, checkpoints = trained
    with copy_of(checkpoints) as copy:
        (copy / "secret").touch()
        manifest = copy / f"step-{STEP}" / "manifest.json"
        content = json_of(manifest)
        if name is None:
            content["files"] = {}
        else:
            content["files"][name] = {"bytes": 0, "sha256": ""}
        manifest.write_bytes(encoded(content))
        assert "holds no checkpoint that is whole" in one_line(config, copy)
        assert replayed(config, checkpoints=copy).rows[0]["step"] == 0
    assert "is not used: manifest.json " in capsys.readouterr().err


def queue(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink()
    try:
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, which has no end
    except PermissionError:
        pytest.skip("making a device needs root")


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-0.safetensors"])
@pytest.mark.parametrize("harm", [queue, device, link, folder])
def test_special_files_are_not_read(
    harm: Callable[[Path], None],
    name: str,
    trained: tuple[RunConfig, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, checkpoints = trained
    with copy_of(checkpoints) as copy:
        harm(copy / f"step-{STEP}" / name)
        assert "holds no checkpoint that is whole" in one_line(config, copy)
    assert f"is not used: {name} cannot be read" in capsys.readouterr().err


def test_a_folder_that_is_a_link_is_not_read(trained: tuple[RunConfig, Path]) -> None:
    config, checkpoints = trained
    with copy_of(checkpoints) as copy:
        (copy / f"step-{STEP}").rename(copy / "elsewhere")
        (copy / f"step-{STEP}").symlink_to(copy / "elsewhere")
        assert "holds no checkpoint that is whole" in one_line(config, copy)


many = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(data=st.data(), name=st.sampled_from(["manifest.json", "index.json"]))
@pytest.mark.slow
def test_any_part_of_the_json_may_be_anything(trained: tuple[RunConfig, Path], data: Any, name: str) -> None:
    config, checkpoints = trained
    with copy_of(checkpoints) as copy:
        file = copy / f"step-{STEP}" / name
        content = json_of(file)
        path = data.draw(st.sampled_from(list(parts_of(content))))
        replace_part(content, path, *data.draw(st.lists(JSON, max_size=1)))
        file.write_bytes(encoded(content))
        if name == "index.json":
            seal(copy / f"step-{STEP}")
        one_line(config, copy)


@many
@given(
    name=st.sampled_from(["index.json", "rank-0.safetensors"]),
    place=st.floats(0, 1),
    instead=st.binary(max_size=6),
    gone=st.integers(0, 6),
)
@example(name="rank-0.safetensors", place=1.0, instead=b"", gone=0)
@pytest.mark.slow
def test_any_bytes_may_be_others(
    trained: tuple[RunConfig, Path], name: str, place: float, instead: bytes, gone: int
) -> None:
    config, checkpoints = trained
    with copy_of(checkpoints) as copy:
        file = copy / f"step-{STEP}" / name
        content = bytearray(file.read_bytes())
        start = int(place * len(content))
        content[start : start + gone] = instead
        file.write_bytes(content)
        seal(copy / f"step-{STEP}")
        one_line(config, copy)
