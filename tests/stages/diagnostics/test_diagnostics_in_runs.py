"""Runs with `train.diagnostics`: their weights, their rows, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resumed import replay_twice, saving
from support.small_runs import Rows, small_config
from support.training_cases import measured

from stages.config.run_config import CorrectionConfig, RunConfig
from stages.trainer import replay


def rows_of(config: RunConfig, *, diagnostics: int) -> list[dict[str, Any]]:
    config.train.diagnostics = diagnostics
    rows = Rows()
    replay(config, recorder=rows)
    return measured(rows)


@pytest.mark.parametrize(
    ("schedule", "options", "correction"),
    [
        ("2bw", {"coefficient": 1.0}, "none"),
        ("2bw", {"coefficient": 1.0, "form": "buffered", "optimizer": "muon", "recompute": "full"}, "none"),
        ("paci", {"clip": "stage"}, "discrepancy"),
        ("2bw-v", {"data": 2, "precision": "bfloat16"}, "none"),
    ],
)
@pytest.mark.slow
def test_the_numbers_of_a_run_stay_the_same(
    schedule: str, options: dict[str, Any], correction: str, text: Path
) -> None:
    config = small_config(schedule, text=text, steps=6, eval_interval=3, **options)
    config.correction = CorrectionConfig(name=correction)
    without = rows_of(config, diagnostics=0)
    rows = rows_of(config, diagnostics=3)
    kept = [row for row in rows if row["kind"] != "diagnostics"]
    for row, expected in zip(kept, without, strict=True):
        # A tensor per parameter is kept.
        assert row | {"memory": None} == expected | {"memory": None}
    for row in (row for row in rows if row["kind"] == "diagnostics"):
        assert -1 <= row["update_cosine"] <= 1
        assert -1 <= row["gradient_cosine"] <= 1
        assert (row["limit"] is None) == (correction != "none")
        assert (row["lr_sharpness"] is None) == (options.get("optimizer") == "muon")
        assert row["lr_sharpness_along_update"] is not None


@pytest.mark.parametrize("options", [{"coefficient": 1.0}, {"coefficient": 1.0, "form": "buffered"}])
@pytest.mark.slow
def test_a_resumed_run_writes_the_same_rows(options: dict[str, Any], text: Path, tmp_path: Path) -> None:
    config = saving(small_config("2bw", text=text, steps=6, eval_interval=3, **options))
    config.train.diagnostics = 3
    # The row of step 3 compares the updates of steps 3 and 2, and the second is before the checkpoint.
    replay_twice(config, tmp_path, step=2)
