"""A checkpoint written by one Python and one torch is read by another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.saved_by import FOLDER, STEP, run_that_saves
from support.small_runs import Rows

from stages.checkpoint.export_options import Weights
from stages.checkpoint.saved_weights import newest_weights
from stages.trainer import replay

WRITTEN = sorted(folder for folder in FOLDER.iterdir() if folder.is_dir())


@pytest.mark.parametrize("folder", WRITTEN, ids=lambda folder: folder.name)
def test_a_checkpoint_of_another_python_is_resumed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    config, rows = run_that_saves(), Rows()
    replay(config, recorder=rows, checkpoints=tmp_path / "c")
    assert [row["step"] for row in rows.of_kind("start")] == [STEP]
    assert [row["step"] for row in rows.of_kind("eval")][-1] == config.train.steps


def test_all_have_the_same_weights() -> None:
    """As far as the versions compute the same: two steps in float32."""
    config = run_that_saves()
    read = [newest_weights(folder, config) for folder in WRITTEN]
    first, *others = [saved.read(saved.names, Weights.MASTER) for saved in read]
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)
