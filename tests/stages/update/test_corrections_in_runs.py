"""Corrections beside error feedback, put into a run by name: what they compute there, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.single_process import check_close, delayed_training
from support.small_runs import Rows, replayed, small_config

from stages.config.run_config import CorrectionConfig, RunConfig
from stages.shape.partition import cut_model
from stages.trainer import replay
from stages.update.optimizer_step import StageUpdate
from stages.validation import check
from stages.weights.weight_versions import WeightVersions


def losses(config: RunConfig) -> list[float]:
    check(config)
    rows = replayed(config)
    return [row["train_loss"] for row in rows.of_kind("step")]


def config_of(schedule: str = "2bw", coefficient: float = 0.0, **correction: object) -> RunConfig:
    config = small_config(
        schedule,
        coefficient=coefficient,
        precision="float64",
        clip="stage" if schedule in ("pipedream", "paci") else "global",
        steps=5,
        stages=3 if schedule == "pipedream" else 2,
    )
    config.correction = CorrectionConfig(**correction)  # type: ignore[arg-type]
    return config


def test_a_reach_of_nothing_is_plain_delay() -> None:
    plain = losses(config_of())
    assert losses(config_of(name="weight-prediction", reach=0.0)) == plain
    assert losses(config_of(name="weight-prediction")) != plain


def test_an_anneal_of_nothing_is_plain_delay() -> None:
    plain = losses(config_of("pipedream"))
    assert losses(config_of("pipedream", name="lr-discount", anneal=0)) == plain
    assert losses(config_of("pipedream", name="lr-discount")) != plain


def test_the_horizon_is_the_stages_delay() -> None:
    """2bw has a delay of 1, so there half the reach is half the prediction: error feedback of 0.5 but for its
    start."""
    whole = losses(config_of(name="weight-prediction"))
    half = losses(config_of(name="weight-prediction", reach=0.5))
    assert whole[:2] == half[:2], "the first two steps compute with the first weights"
    assert whole[2:] != half[2:]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_delay_compensation_is_its_formula(optimizer: str) -> None:
    config = config_of(name="delay-compensation", strength=30.0)
    config.optimizer.name = optimizer
    weights, expected, _ = delayed_training(config, delay=1, compensation=30.0)
    _, plain, _ = delayed_training(config, delay=1)
    result = replay(config, recorder=Rows())
    assert result.train_losses == pytest.approx(expected, rel=1e-10)
    assert result.train_losses != pytest.approx(plain, rel=1e-8)
    check_close(result.weights, weights)


def test_delay_compensation_reaches_every_stage_with_its_own_delay() -> None:
    plain = losses(config_of("pipedream"))
    assert losses(config_of("pipedream", name="delay-compensation", strength=0.0)) == plain
    assert losses(config_of("pipedream", name="delay-compensation", strength=30.0)) != plain


@pytest.mark.parametrize("sync_steps", [0, 1, 2, 4, 5, 100])
def test_a_synchronous_start_is_synchronous_and_then_delayed(sync_steps: int) -> None:
    config = config_of(name="sync-start", sync_steps=sync_steps)
    check(config)
    weights, expected, _ = delayed_training(config, delay=1, synchronous_steps=min(sync_steps, 5))
    result = replay(config, recorder=Rows())
    assert result.train_losses == pytest.approx(expected, rel=1e-10)
    check_close(result.weights, weights)


def test_a_corrected_backward_reads_the_estimate_and_leaves_the_weights_as_they_were() -> None:
    config = small_config("paci", stages=1, layers=1, precision="float64")
    config.correction = CorrectionConfig(name="discrepancy", memory=0.5)
    (cut,) = cut_model(config.model, stages=1, context=12)
    weights = WeightVersions(
        config.model,
        cut,
        context=12,
        seed=0,
        replicas=1,
        gradient_buffers=1,
        master_dtype=torch.float64,
        replica_dtype=torch.float64,
        device=torch.device("cpu"),
    )
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
    def of(stages: int, **correction: object) -> list[float]:
        config = small_config("paci", stages=stages, microbatches=2, steps=6, precision="float64")
        config.correction = CorrectionConfig(**correction)  # type: ignore[arg-type]
        check(config) if stages > 1 else None
        return replay(config, recorder=Rows()).train_losses

    assert of(3, name="discrepancy") != of(3)
    assert of(3, name="discrepancy")[:2] == of(3)[:2]
    assert of(1, name="discrepancy") == of(1)


def test_stage_aware_refresh_differs_where_delays_differ() -> None:
    found = {}
    for schedule in ("pipedream", "2bw"):
        for aware in (False, True):
            config = config_of(schedule)
            config.optimizer.name, config.optimizer.refresh_interval = "basis-rotation", 2
            config.optimizer.stage_aware = aware
            found[schedule, aware] = losses(config)
    assert found["2bw", True] == found["2bw", False], "one delay, one interval"
    assert found["pipedream", True] != found["pipedream", False]
