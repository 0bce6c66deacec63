"""`train.deterministic`: torch's mode is on while a run trains, and on a CPU not one bit changes."""

from __future__ import annotations

import os

import pytest
import torch
from support.small_runs import Rows, small_config

from stages.config.run_config import changed
from stages.rows import Row, Step
from stages.trainer import replay


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_asks_torch_for_it_and_computes_the_same(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    ends: list[str] = []
    modes: list[tuple[int, bool]] = []

    class Watching(Rows):
        def append(self, row: Row) -> None:
            super().append(row)
            if isinstance(row, Step):
                modes.append((len(ends), torch.are_deterministic_algorithms_enabled()))

    for wanted in (False, True):
        config = small_config("2bw", precision=precision, recompute="full", optimizer="muon")
        config = changed(config, {"train.deterministic": wanted})
        rows = Watching()
        replay(config, recorder=rows)
        ends.append(rows.digest)
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == wanted
        assert not torch.are_deterministic_algorithms_enabled()
    assert ends[0] == ends[1]
    assert set(modes) == {(0, False), (1, True)}
