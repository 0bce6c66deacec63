"""torch's profile of the first steps, and the memory snapshot after running out of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_runs import Rows, in_processes, small_config

from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.pipeline.torch_profile import memory_snapshot
from stages.trainer import train

PROFILED = 2


def trained_losses(process: Process, given: tuple[RunConfig, Path]) -> list[float]:
    config, folder = given
    return list(train(config, process=process, recorder=Rows(), dump_folder=folder).train_losses)


@pytest.mark.slow
def test_the_first_steps_of_every_rank_are_profiled(tmp_path: Path) -> None:
    config = small_config("2bw", steps=6, eval_interval=4)
    profiled = replace(config, train=replace(config.train, profile_steps=PROFILED))
    plain, folder = tmp_path / "plain", tmp_path / "profiled"
    by_rank = in_processes(trained_losses, [(config, plain), (profiled, folder)], size=2)
    assert all(without == with_profile for without, with_profile in by_rank)
    assert not plain.exists()
    program = segment_program(config, first_step=0, steps=4)
    for rank, actions in enumerate(program.actions):
        events = json.loads((folder / f"rank-{rank}.profile.json").read_text())["traceEvents"]
        names = {event["name"] for event in events if event.get("ph") == "X"}
        # Until the first micro-batch of a later step.
        in_time = [action for action in actions if action.microbatch < PROFILED * program.microbatches]
        spans = {str(action) for action in actions} & names
        assert spans
        assert spans <= {str(action) for action in in_time}
        assert any(name.startswith("aten::") for name in names)


def test_running_out_of_memory_leaves_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "attempt" / "rank-0.memory.pickle"
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"x"))
    with pytest.raises(torch.OutOfMemoryError), memory_snapshot(file, with_history=False):
        raise torch.OutOfMemoryError("no memory")
    assert file.read_bytes() == b"x"
    assert str(file) in capsys.readouterr().err


def test_a_snapshot_that_fails_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", refuse)
    with pytest.raises(torch.OutOfMemoryError), memory_snapshot(tmp_path / "x", with_history=True):
        raise torch.OutOfMemoryError("no memory")
    assert "no memory snapshot: no device" in capsys.readouterr().err
