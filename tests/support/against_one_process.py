"""Compare a run with the same training in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.single_process import delayed_training
from support.small_runs import Rows

from stages.config import RunConfig
from stages.trainer import replay


def check_against_one_process(config: RunConfig, **reference: Any) -> None:
    """Replay a run; losses, gradient norms and weights equal those of `delayed_training` to 1e-10."""
    rows = Rows()
    result = replay(config, recorder=rows)
    total_microbatches = config.schedule.microbatches * config.parallel.data
    unsharded = replace(config, schedule=replace(config.schedule, microbatches=total_microbatches))
    weights, losses, norms = delayed_training(unsharded, **reference)
    assert result.train_losses == pytest.approx(losses, rel=1e-10)
    if config.train.clip == "global":
        expected_norms = [norm for step, norm in enumerate(norms) if step not in reference.get("skipped", ())]
        reported_norms = [row["grad_norm"] for row in rows.of_kind("step") if not row["skipped"]]
        assert reported_norms == pytest.approx(expected_norms, rel=1e-10)
        assert max(norms) > config.train.clip_norm, "clipping was never active"
    assert result.weights.keys() == weights.keys()
    for name, expected in weights.items():
        torch.testing.assert_close(result.weights[name], expected, rtol=1e-10, atol=1e-10)
    tokens = total_microbatches * config.train.microbatch_size * config.data.context
    assert rows.of_kind("start")[0]["tokens_per_step"] == tokens
