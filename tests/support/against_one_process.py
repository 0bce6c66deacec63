"""Compare a run with the same training in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.first_gradient import first_gradient, joined
from support.single_process import delayed_training
from support.small_runs import Rows
from torch import Tensor

from stages.config.run_config import RunConfig
from stages.trainer import replay


def check_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Tensors have the same names, and are equal to 1e-10."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)


def check_first_gradient(config: RunConfig, expected: Mapping[str, Tensor]) -> None:
    """The pipeline's gradient of the first step is as expected, which is nowhere nothing."""
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-6, name
    check_close(joined(first_gradient(config)), expected)


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
    check_close(joined(result.weights), weights)
    tokens = total_microbatches * config.train.microbatch_size * config.data.context
    assert rows.of_kind("start")[0]["tokens_per_step"] == tokens
