"""The weights that a run's processes start from: read by who needs them, checked by one process a machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_runs import Rows, in_processes, small_config

from stages.checkpoint.initial_weights import WEIGHTS_FILE, content_sha256
from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.trainer import replay, train


def train_here(process: Process, config: RunConfig) -> None:
    """Leaves beside the weights how often this process has read all of them, and what came out."""
    hashed: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        # safetensors reads without Python's files.
        if event == "open" and str(arguments[0]).endswith(WEIGHTS_FILE):
            hashed.append(str(arguments[0]))

    sys.addaudithook(note)
    folder = Path(str(config.model.init))
    result = train(config, process=process, recorder=Rows())
    save_file(
        {name: tensor.contiguous() for name, tensor in result.weights.items()}, f"{folder}-{process.rank}"
    )
    Path(f"{folder}-{process.rank}-hashed").write_text(str(len(hashed)))


@pytest.mark.slow
def test_one_process_per_machine_reads_all_of_them_and_a_change_ends_every_process(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    config = small_config("2bw", stages=1, data=2, lr=1e-30, **{"optimizer.weight_decay": 0.0})
    weights = replay(replace(config, seed=7), recorder=Rows()).weights
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, given / WEIGHTS_FILE)
    whole = replace(config, model=replace(config.model, init=str(given), init_sha256=content_sha256(given)))
    other = replace(whole, model=replace(whole.model, init_sha256="0" * 64))
    with pytest.raises(AssertionError, match="has changed since the run was made") as failed:
        in_processes(train_here, [whole, other], size=2)
    assert "GoneError: rank 0" in str(failed.value)
    hashed = [int(Path(f"{given}-{rank}-hashed").read_text()) for rank in range(2)]
    assert hashed == [2, 0]  # for the values, and for the hash
    trained = [load_file(f"{given}-{rank}") for rank in range(2)]
    assert {name for of_rank in trained for name in of_rank} == weights.keys()
    for of_rank in trained:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in of_rank.items())
