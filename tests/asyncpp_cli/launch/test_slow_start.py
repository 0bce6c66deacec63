"""What a rank does before its first message may take longer than a message may: it has the start's time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import succeeded
from support.launches import ONE, sweep
from support.rows import plain

SECONDS = 25
"""Time that the first forward takes at least; longer than the messages of these runs wait."""
SETTINGS = ["train.steps=2", "train.eval_interval=2", "site.device=cpu", f"site.timeout={SECONDS - 10}"]

OWN = f"""
import time
from pathlib import Path
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        try:
            Path(__file__).with_name("to-build").rmdir()
            time.sleep({SECONDS})
        except FileNotFoundError:
            pass
        return x + self.linear(x)

def make(config, context):
    blocks = [Block(config.width) for _ in range(config.layers)]
    head = nn.Linear(config.width, config.vocab_size, bias=False)
    return nn.Embedding(config.vocab_size, config.width), blocks, head
"""
"""A model whose first forward, on one of the ranks, takes its time."""


@pytest.mark.slow
def test_a_model_of_ones_own_may_build_in_its_first_forward_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_model.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--allow-code", "slow_model", "model.factory=slow_model:make"]
    experiment = sweep(tmp_path / "e", *ONE, *SETTINGS, *own)
    (tmp_path / "to-build").mkdir()
    succeeded("launch", experiment.folder, "--quiet")
    assert not (tmp_path / "to-build").exists()
    [start] = [row for row in plain(experiment.runs[0]) if row["kind"] == "start"]
    assert start["warm_up_seconds"] > 0
