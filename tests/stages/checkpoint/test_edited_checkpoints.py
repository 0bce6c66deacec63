"""Every tensor, key and type of a checkpoint, edited one at a time: the one before is used, or none; never
other weights or another state than was saved."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.json_values import parts_of, replace_part
from support.resumed import json_of, saving, seal
from support.small_runs import Rows, ranks_of, small_config
from torch import Tensor

from stages.checkpoint import files
from stages.checkpoint.export_options import Weights
from stages.checkpoint.files import LostCheckpointError
from stages.checkpoint.manager import Checkpoints
from stages.checkpoint.saved_weights import newest_weights
from stages.checkpoint.state import pack
from stages.config.records import encoded
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.trainer import replay
from stages.update.optimizer_step import StageState

STEPS = (2, 4)
STATES = {"muon": {"coefficient": 1.0}, "soap": {"coefficient": 1.0, "form": "buffered"}}
"""Optimizers, with error feedback in its two forms."""


class Trained(NamedTuple):
    config: RunConfig
    folder: Path
    stages: list[StageState]
    saved: dict[int, dict[str, Tensor]]
    """The state of each step."""

    def load(self, folder: Path) -> tuple[int, dict[str, Tensor]]:
        """The step that a run goes on from, and its state then."""
        checkpoints = Checkpoints(folder, keep=9, process=None, timeout=60, oldest=0, owners=())
        step = checkpoints.load(self.stages, self.versions).step
        tensors: dict[str, Tensor] = {}
        for stage in self.stages:
            tensors |= pack(stage, self.versions(step))[0]
        return step, {key: tensor.clone() for key, tensor in tensors.items()}

    def versions(self, step: int) -> tuple[int, ...]:
        return tuple(segment_program(self.config, first_step=step, steps=1).initial_versions)


@pytest.fixture(scope="module", params=STATES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    config = saving(small_config("2bw", optimizer=request.param, layers=1, stages=1, **STATES[request.param]))
    config = replace(config, model=replace(config.model, width=8, heads=2, kv_heads=1, mlp_width=12))
    folder = tmp_path_factory.mktemp(request.param)
    replay(config, recorder=Rows(), checkpoints=folder / "c")
    stages = [stage for rank in ranks_of(config) for stage in rank.stages.values()]
    trained = Trained(config, folder / "c", stages, {})
    for step in STEPS:
        trained.saved[step] = load_file(folder / "c" / f"step-{step}" / "rank-0.safetensors")
    return trained


class Content:
    """The newest checkpoint: its tensors and its index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tensors = load_file(folder / "rank-0.safetensors")
        self.index = json_of(folder / "index.json")

    def write(self) -> None:
        save_file(self.tensors, self._folder / "rank-0.safetensors")
        (self._folder / "index.json").write_bytes(encoded(self.index))
        seal(self._folder)

    def describe(self, key: str) -> None:
        """Let the index say what the file holds."""
        tensor = self.tensors[key]
        self.index["tensors"][key] = {
            "file": "rank-0.safetensors",
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }

    def edit(self, how: str, key: str) -> None:
        """Edit a tensor in one of the ways of `EDITS`."""
        tensors, listed = self.tensors, self.index["tensors"]
        tensor = tensors[key]
        flipped = tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]
        match how.removesuffix(" in the file"):
            case "lost":
                del tensors[key]
            case "lost from the index":
                del listed[key]
            case "renamed":
                tensors[f"{key}x"] = tensors.pop(key)
                del listed[key]
                return self.describe(f"{key}x")
            case "transposed":
                tensors[key] = tensor.mT.contiguous() if flipped else tensor.unsqueeze(0)
            case "of another type":
                tensors[key] = tensor.double()
            case "of another type in the index":
                listed[key]["dtype"] = "int32"
        if how == "lost":
            del listed[key]
        elif how in ("transposed", "of another type"):
            self.describe(key)
        return None


IN_THE_FILE = ("lost in the file", "transposed in the file", "of another type in the index")
"""Edits that are seen when the tensor is read."""
EDITS = ("lost", "lost from the index", "renamed", "transposed", "of another type", *IN_THE_FILE)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[key]) for key, tensor in first.items()
    )


def check_loaded(trained: Trained, folder: Path) -> None:
    """A run goes on from the checkpoint before."""
    step, state = trained.load(folder)
    assert step == STEPS[0]
    assert same(state, trained.saved[step])


def check_passed_over(trained: Trained, copy: Path, *, alone: Path) -> None:
    """A run goes on from the checkpoint before, and from none where there is no other."""
    check_loaded(trained, copy)
    with pytest.raises(LostCheckpointError, match="no checkpoint fits this run") as refused:
        trained.load(alone)
    assert "\n" not in str(refused.value)


def use_alone(both: Path, alone: Path) -> None:
    target = alone / f"step-{STEPS[-1]}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(files.folder_of(both, STEPS[-1]), target)


def check_exported(trained: Trained, folder: Path) -> int:
    """What is exported are the weights of the step that it says; returns the step."""
    exported = newest_weights(folder, trained.config)
    for weights, prefix in (
        (Weights.MASTER, "master/"),
        (Weights.WORKING, f"version/{max(trained.versions(exported.step))}/"),
    ):
        saved = trained.saved[exported.step]
        expected = {
            key.removeprefix(prefix): tensor for key, tensor in saved.items() if key.startswith(prefix)
        }
        if weights is Weights.WORKING or trained.config.error_feedback.form != "buffered":
            assert same(exported.read(exported.names, weights), expected)
    return exported.step


def test_unedited_it_is_loaded(trained: Trained) -> None:
    step, state = trained.load(trained.folder)
    assert step == STEPS[-1]
    assert same(state, trained.saved[step])
    assert check_exported(trained, trained.folder) == step


def one_of_each_kind(saved: dict[str, Tensor]) -> list[str]:
    """Of the tensors of one kind and number of dimensions, which are checked alike, the first."""
    first: dict[Any, str] = {}
    for key, tensor in saved.items():
        kind, _, rest = key.partition("/")
        first.setdefault((kind, rest.rpartition("/")[2] if kind == "optimizer" else "", tensor.ndim), key)
    return list(first.values())


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.slow
def test_an_edited_tensor_is_not_used(edit: str, trained: Trained, tmp_path: Path) -> None:
    newest = tmp_path / "both" / f"step-{STEPS[-1]}"
    shutil.copytree(trained.folder, tmp_path / "both")
    for key in one_of_each_kind(trained.saved[STEPS[-1]]):
        shutil.rmtree(newest)
        shutil.copytree(files.folder_of(trained.folder, STEPS[-1]), newest)
        content = Content(newest)
        content.edit(edit, key)
        content.write()
        check_loaded(trained, tmp_path / "both")
        if key.startswith(("master/", "version/")) and edit not in IN_THE_FILE:
            assert check_exported(trained, tmp_path / "both") == STEPS[0]
    use_alone(tmp_path / "both", tmp_path / "alone")
    check_passed_over(trained, tmp_path / "both", alone=tmp_path / "alone")


def test_state_that_the_optimizer_does_not_keep_is_refused(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained.folder, tmp_path / "both")
    content = Content(tmp_path / "both" / f"step-{STEPS[-1]}")
    name = next(iter(content.index["stages"][0]["parameters"]))
    content.tensors[f"optimizer/{name}/extra"] = torch.zeros(3)
    content.describe(f"optimizer/{name}/extra")
    content.write()
    use_alone(tmp_path / "both", tmp_path / "alone")
    check_passed_over(trained, tmp_path / "both", alone=tmp_path / "alone")


@pytest.mark.slow
def test_no_edit_of_the_index_changes_what_is_loaded(trained: Trained, tmp_path: Path) -> None:
    newest = tmp_path / "both" / f"step-{STEPS[-1]}"
    shutil.copytree(trained.folder, tmp_path / "both")
    original = Content(newest)
    # All tensors are edited above.
    some = list(original.index["tensors"].items())[::27]
    text = json.dumps(original.index)
    used = {}
    for path in parts_of(original.index | {"tensors": dict(some)}):
        for remove in (True, False):
            content = json.loads(text)
            value = functools.reduce(lambda inside, key: inside[key], path, content)
            replace_part(content, path, *([] if remove else [[1] if isinstance(value, str) else "x"]))
            (newest / "index.json").write_bytes(encoded(content))
            seal(newest)
            step, state = trained.load(tmp_path / "both")
            assert same(state, trained.saved[step]), path
            assert check_exported(trained, tmp_path / "both") in STEPS
            used[(*path, remove)] = step
    # A run looks for the versions that it needs, whatever `versions` says; export compares them. `rows` are
    # those of its metrics, and here it has none.
    assert {path[0] for path, step in used.items() if step == STEPS[-1]} <= {"versions", "rows"}
