"""Corrections beside error feedback, put into a run by name: what they compute there, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.single_process import check_against_one_process, delayed_training
from support.small_runs import Rows, ranks_of, replayed, small_config

from stages.config.run_config import CorrectionConfig, RunConfig, changed
from stages.resolve.checks import check
from stages.trainer import replay
from stages.update.optimizer_step import StageUpdate


def config_of(
    schedule: str = "2bw", *, data: int = 1, optimizer: str = "adamw", **correction: Any
) -> RunConfig:
    stages = 3 if schedule == "pipedream" else 2
    settings: dict[str, Any] = {"precision": "float64", "steps": 5, "clip_norm": 0.3}
    config = small_config(schedule, stages=stages, data=data, optimizer=optimizer, **settings)
    config = changed(config, {"correction": CorrectionConfig(**correction)})
    check(config)
    return config


def losses(*given: str, **settings: Any) -> list[float]:
    return replayed(config_of(*given, **settings)).result.train_losses


@pytest.mark.parametrize(
    ("schedule", "name", "neutral", "active"),
    [
        ("2bw", "weight-prediction", {"reach": 0.0}, {}),
        ("pipedream", "lr-discount", {"anneal": 0}, {}),
        ("pipedream", "delay-compensation", {"strength": 0.0}, {"strength": 30.0}),
    ],
)
def test_a_correction_by_nothing_is_plain_delay(
    schedule: str, name: str, neutral: dict[str, Any], active: dict[str, Any]
) -> None:
    plain = losses(schedule)
    assert losses(schedule, name=name, **neutral) == plain
    assert losses(schedule, name=name, **active) != plain


def test_the_horizon_is_the_stages_delay() -> None:
    """2bw has a delay of 1, so there half the reach is half the prediction: error feedback of 0.5 but for its
    start."""
    whole, half = (losses(name="weight-prediction", reach=reach) for reach in (1.0, 0.5))
    assert whole[:2] == half[:2], "the first two steps compute with the first weights"
    assert whole[2:] != half[2:]


@pytest.mark.parametrize(("optimizer", "data"), [("adamw", 1), ("muon", 1), ("adamw", 2)])
def test_delay_compensation_is_its_formula(optimizer: str, data: int) -> None:
    """On several data ranks it acts on the sum of the gradients."""
    config = config_of(data=data, optimizer=optimizer, name="delay-compensation", strength=30.0)
    rows = check_against_one_process(config, delay=1, compensation=30.0)
    if data == 1:
        _, plain, _ = delayed_training(config, delay=1)
        assert [row["train_loss"] for row in rows.of_kind("step")] != pytest.approx(plain, rel=1e-8)


@pytest.mark.parametrize("sync_steps", [0, 1, 4, 100])
def test_a_synchronous_start_is_synchronous_and_then_delayed(sync_steps: int) -> None:
    config = config_of(name="sync-start", sync_steps=sync_steps)
    check_against_one_process(config, delay=1, synchronous_steps=min(sync_steps, 5))


def test_stages_keep_what_the_longest_segment_under_delay_needs() -> None:
    """Segments of 2 synchronous steps, then of 1, 1, 2, 2, 1, 3 and 1."""
    config = small_config("pipedream", stages=4, microbatches=1, steps=13)
    config = changed(
        config,
        {"train.checkpoint_interval": 4, "correction": CorrectionConfig(name="sync-start", sync_steps=2)},
    )
    check(config)
    assert max(row["memory"]["versions"][0] for row in replayed(config).of_kind("segment")) == 3


def test_a_corrected_backward_reads_the_estimate_and_leaves_the_weights_as_they_were() -> None:
    config = small_config("paci", stages=1, layers=1, precision="float64")
    config = changed(config, {"correction": CorrectionConfig(name="discrepancy", memory=0.5)})
    weights = ranks_of(config)[0].stages[0].weights
    update = StageUpdate(config, weights, stage=0, delays=[2], mismatch=2)
    before = [parameter.detach().clone() for parameter in weights.master.parameters]
    weights.gradient_buffer.flat.fill_(0.01)
    update.apply(weights.take_gradient(), version=1, step=0, clip_by=None, finite=True)
    replica = weights.replica_of(1)
    after = [parameter.detach().clone() for parameter in replica.parameters]
    with update.at_backward(replica, mismatch=2):
        for parameter, old, new in zip(replica.parameters, before, after, strict=True):
            # One update has been: v = (1 - gamma) (new - old), gamma = memory^(1 / mismatch).
            velocity = (1 - 0.5**0.5) * (new - old)
            torch.testing.assert_close(parameter.detach(), new - 2 * velocity, rtol=0, atol=1e-14)
            assert not torch.equal(parameter, new)
    assert all(torch.equal(now, kept) for now, kept in zip(replica.parameters, after, strict=True))


def test_discrepancy_changes_unstashed_runs_only_where_there_is_a_mismatch() -> None:
    def of(stages: int, correction: CorrectionConfig) -> list[float]:
        config = small_config("paci", stages=stages, steps=6, precision="float64")
        return replay(replace(config, correction=correction), recorder=Rows()).train_losses

    plain, corrected = CorrectionConfig(), CorrectionConfig(name="discrepancy")
    assert of(3, corrected) != of(3, plain)
    assert of(3, corrected)[:2] == of(3, plain)[:2]
    assert of(1, corrected) == of(1, plain)


def test_stage_aware_refresh_differs_where_delays_differ() -> None:
    for schedule, differs in (("pipedream", True), ("2bw", False)):  # of one delay, and so one interval
        ends = []
        for aware in (False, True):
            config = config_of(schedule, optimizer="basis-rotation")
            config = changed(config, {"optimizer.refresh_interval": 2, "optimizer.stage_aware": aware})
            ends.append(replayed(config).digest)
        assert (ends[0] != ends[1]) == differs
