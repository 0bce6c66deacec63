"""The pipeline against one process that has the whole model."""

from __future__ import annotations

import pytest
import torch
from support.single_process import (
    batches,
    check_against_one_process,
    check_close,
    check_first_gradient,
    delayed_training,
    step_gradient,
    whole_model,
)
from support.small_runs import Rows, small_config, with_experts
from support.training_cases import within_blocks
from torch import Tensor

from schedules import FAMILY
from stages.comm.topology import connect_in_process
from stages.data.dataset import prepare
from stages.liveness.stop_signal import never
from stages.pipeline.build import build_ranks, segment_lengths
from stages.shape.partition import cut_model
from stages.trainer import replay
from stages.weights.flat_buffers import GradientBuffer
from stages.weights.weight_versions import WeightVersions

SYNCHRONOUS = tuple(name for name, schedule in FAMILY.items() if schedule.synchronous)


@pytest.mark.parametrize(
    ("schedule", "stages", "family"),
    [
        ("1f1b", 4, "llama within blocks"),
        ("zb-v", 2, "qwen3 within blocks"),
        ("zero-bubble", 4, "experts within blocks"),
        *((schedule, stages, "llama") for schedule in SYNCHRONOUS for stages in (1, 2, 4)),
        *((schedule, stages, "qwen3") for schedule in ("1f1b", "zero-bubble") for stages in (1, 2)),
        *((schedule, stages, "experts") for schedule in ("1f1b", "zero-bubble") for stages in (1, 2, 4)),
    ],
)
def test_gradients_of_synchronous_schedules_are_those_of_a_single_process(
    schedule: str, stages: int, family: str
) -> None:
    chunks = 2 if "chunks" in FAMILY[schedule].options else 1
    microbatches = 8 if schedule == "dualpipe-v" else 4
    config = small_config(
        schedule, stages=stages, microbatches=microbatches, chunks=chunks, layers=8, precision="float64"
    )
    family, _, within = family.partition(" ")
    if within:
        config.parallel.cut = within_blocks(layers=8, stages=4)
    if family == "experts":
        config = with_experts(config, shared_experts=1, dense_layers=1)
    else:
        config.model.family = family
    module = whole_model(config, dtype=torch.float64)
    expected, _ = step_gradient(module, batches(config), step=0, microbatches=microbatches)
    check_first_gradient(config, expected)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("schedule", "delay", "coefficient"),
    [("1f1b", 0, 0.0), ("gpipe", 0, 0.0), ("2bw", 1, 0.0), ("2bw", 1, 1.0), ("2bw", 1, 0.5)],
)
@pytest.mark.slow
def test_a_run_is_the_recurrence_written_out_on_one_process(
    schedule: str, delay: int, coefficient: float, optimizer: str
) -> None:
    config = small_config(
        schedule,
        stages=3,
        microbatches=3,
        optimizer=optimizer,
        coefficient=coefficient,
        steps=7,
        precision="float64",
        clip_norm=0.5,
    )
    check_against_one_process(config, delay=delay)


def test_synchronous_vs_train_to_the_weights_of_1f1b() -> None:
    common = {"microbatches": 5, "layers": 4, "steps": 5, "optimizer": "muon"}
    expected = replay(small_config("1f1b", precision="float64", **common), recorder=Rows())
    for schedule in ("zb-v", "v-half", "v-min"):
        result = replay(small_config(schedule, precision="float64", **common), recorder=Rows())
        assert result.train_losses == pytest.approx(expected.train_losses, rel=1e-10)
        check_close(result.weights, expected.weights)


@pytest.mark.slow
def test_two_stage_2bw_differs_from_synchronous_training() -> None:
    synchronous = replay(small_config("1f1b", steps=5), recorder=Rows())
    delayed = replay(small_config("2bw", steps=5), recorder=Rows())
    # Steps 0 and 1 read W(0) and W(1) under 1f1b, W(0) twice under 2bw.
    assert delayed.train_losses[0] == synchronous.train_losses[0]
    assert delayed.train_losses[1] != synchronous.train_losses[1]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.slow
def test_drains_change_no_weights(schedule: str) -> None:
    def final(eval_interval: int) -> dict[str, Tensor]:
        config = small_config(schedule, steps=6, eval_interval=eval_interval, coefficient=0)
        assert len(segment_lengths(config)) == -(-6 // eval_interval)
        return replay(config, recorder=Rows()).weights

    seldom, often = final(6), final(1)
    assert all(torch.equal(seldom[name], often[name]) for name in seldom)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.slow
def test_the_two_forms_of_error_feedback_agree(optimizer: str) -> None:
    results = [
        replay(
            small_config(
                "2bw", optimizer=optimizer, coefficient=1.0, form=form, steps=8, precision="float64"
            ),
            recorder=Rows(),
        )
        for form in ("look-ahead", "buffered")
    ]
    assert results[0].train_losses == pytest.approx(results[1].train_losses, rel=1e-11)
    assert results[0].val_losses == pytest.approx(results[1].val_losses, rel=1e-11)


def test_weights_at_the_start_do_not_depend_on_the_cut() -> None:
    def initial(stages: int) -> dict[str, Tensor]:
        config = small_config(stages=stages)
        ranks = build_ranks(
            config,
            connections=connect_in_process(rank_of_stage=range(stages), data_ranks=1),
            corpus=prepare(config.data),
            device=torch.device("cpu"),
            on_step=lambda result: None,
            stop=never,
        )
        return {
            name: parameter.detach().clone()
            for rank in ranks
            for state in rank.stages.values()
            for name, parameter in zip(state.weights.names, state.weights.replicas[0].parameters, strict=True)
        }

    whole = initial(1)
    for stages in (2, 3, 4):
        cut = initial(stages)
        assert cut.keys() == whole.keys()
        assert all(torch.equal(cut[name], whole[name]) for name in whole)


@pytest.mark.parametrize("clip", ["global", "stage", "none"])
def test_what_is_clipped_by(clip: str) -> None:
    config = small_config(stages=2, microbatches=2, clip=clip, steps=1, precision="float64")
    rows = Rows()
    replay(config, recorder=rows)
    gradient, _ = step_gradient(
        whole_model(config, dtype=torch.float64), batches(config), step=0, microbatches=2
    )
    # The last stage reports.
    last = cut_model(config.model, stages=2, context=config.data.context)[-1]
    held = ("norm.", "head.", *(f"blocks.{index}." for index in last.blocks))
    parts = [part.flatten() for name, part in gradient.items() if clip == "global" or name.startswith(held)]
    expected = None if clip == "none" else pytest.approx(float(torch.cat(parts).norm()), rel=1e-10)
    assert rows.of_kind("step")[0]["grad_norm"] == expected


@pytest.mark.parametrize(("schedule", "coefficient"), [("1f1b", 0.0), ("2bw", 0.0), ("2bw", 1.0)])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_stages_and_changes_nothing_else(
    schedule: str, coefficient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(
        schedule, stages=3, microbatches=3, layers=3, coefficient=coefficient, steps=6, precision="float64"
    )
    take = WeightVersions.take_gradient

    def spoiled(self: WeightVersions) -> GradientBuffer:
        gradient = take(self)
        # The gradient of step 2 is taken while version 2 is the newest.
        if "blocks.1.mlp.up.weight" in self.names and newest_version(self) == 2:
            gradient.views[0].view(-1)[0] = float("nan")
        return gradient

    monkeypatch.setattr(WeightVersions, "take_gradient", spoiled)
    rows = Rows()
    result = replay(config, recorder=rows)
    assert [row["skipped"] for row in rows.of_kind("step")] == [False, False, True, False, False, False]
    delay = 1 if schedule == "2bw" else 0
    weights, losses, _ = delayed_training(config, delay=delay, skipped=frozenset({2}))
    assert result.train_losses == pytest.approx(losses, rel=1e-10)
    check_close(result.weights, weights)


def newest_version(weights: WeightVersions) -> int:
    return max(replica.version for replica in weights.replicas)
