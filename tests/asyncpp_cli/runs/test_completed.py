"""A run is completed when its end row says so, and not by an exit code that its own code chose."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import asyncpp, succeeded
from support.launches import ONE, sweep

from asyncpp_cli.runs.status import State

MODEL = """
import os, sys
from torch import nn

class Leaving(nn.Linear):
    def forward(self, x):
        sys.exit(75)

def linear(config, context):
    blocks = [nn.Linear(config.width, config.width) for _ in range(config.layers)]
    return nn.Embedding(config.vocab_size, config.width), blocks, nn.Linear(config.width, config.vocab_size)

def exit_0(config, context):
    raise SystemExit(0)

def in_forward(config, context):
    embedding, blocks, head = linear(config, context)
    return embedding, [*blocks[:-1], Leaving(config.width, config.width)], head
"""


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("exit_0", "FactoryError: own_models:exit_0 ended the process (SystemExit: 0)"),
        ("in_forward", "the run's own code ended the process (SystemExit: 75)"),
        ("linear", ""),
    ],
)
@pytest.mark.slow
def test_a_model_that_ends_the_process_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None, factory: str, reason: str
) -> None:
    (tmp_path / "own_models.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("to be or not to be " * 400)
    monkeypatch.syspath_prepend(tmp_path)
    changes = [f"model.factory=own_models:{factory}", f"data.path={tmp_path / 'text.txt'}", "train.steps=2"]
    [run] = sweep(tmp_path / "e", *ONE, *changes).runs
    if reason:
        with pytest.raises((RuntimeError, ValueError)):
            asyncpp("train", run.folder, "--replay")
    else:
        succeeded("train", run.folder, "--replay")
    status = run.status()
    assert status.state == (State.FAILED if reason else State.COMPLETED), status.reason
    assert reason in status.reason
