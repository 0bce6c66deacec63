"""Steps whose gradient is not finite: left out on all ranks, and too many in a row end the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.single_process import check_against_one_process
from support.small_runs import Rows, in_processes, newest_version, replayed, small_config, spoil_gradients

from stages.comm.process import Process
from stages.config.run_config import RunConfig, changed
from stages.trainer import replay, train
from stages.training_loop import SkippedTooOftenError
from stages.update.optimizer_step import StageUpdate, UpdateResult
from stages.weights.flat_buffers import GradientBuffer


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("clip", ["global", "stage", "none"])
@pytest.mark.parametrize(("schedule", "coefficient"), [("1f1b", 0.0), ("2bw", 0.0), ("2bw", 1.0)])
def test_one_data_ranks_gradient_that_is_not_finite_skips_the_step_everywhere(
    schedule: str, coefficient: float, clip: str, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(
        schedule,
        stages=3,
        data=data,
        microbatches=3,
        coefficient=coefficient,
        steps=6,
        precision="float64",
        clip=clip,
        clip_norm=0.5 if clip == "global" else 1e9,
    )
    # The gradient of step 2 is taken while version 2 is the newest.
    spoil_gradients(monkeypatch, when=lambda weights: newest_version(weights) == 2, data_rank=data - 1)
    rows = check_against_one_process(config, delay=int(schedule == "2bw"), skipped=frozenset({2}))
    assert [row["skipped"] for row in rows.of_kind("step")] == [False, False, True, False, False, False]


@pytest.mark.parametrize("schedule", ["paci", "pipedream"])
def test_stages_that_update_on_their_own_skip_on_all_their_data_ranks(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(schedule, data=2, layers=2, clip="none", update_interval=2, steps=6)
    spoil_gradients(monkeypatch, when=lambda weights: newest_version(weights) == 2, data_rank=1)
    rows = replayed(config)
    assert [row["skipped"] for row in rows.of_kind("step")] == [False, False, True, False, False, False]
    assert all(torch.isfinite(weight).all() for weight in rows.result.weights.values())


@pytest.mark.parametrize(
    ("schedule", "clip", "words", "last"),
    [
        ("1f1b", "none", "the gradient was not finite in 4 updates in a row, up to update 6:", 6),
        # A step is in flight already.
        ("2bw", "global", "the gradient was not finite in 4 updates in a row, up to update 6:", 7),
        # Nothing tells the stages of each other before they drain.
        (
            "paci",
            "stage",
            "the gradient of stage 1 was not finite in 4 updates in a row, up to update 6:",
            10,
        ),
    ],
)
@pytest.mark.parametrize("data", [1, 2])
def test_a_run_that_skips_too_often_ends_with_the_reason(
    schedule: str, clip: str, words: str, last: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(schedule, data=data, layers=2, clip=clip, steps=20, eval_interval=10)
    config = changed(config, {"train.max_skipped": 4})
    spoil_gradients(monkeypatch, when=lambda weights: newest_version(weights) >= 2, data_rank=data - 1)
    rows = Rows()
    with pytest.raises(SkippedTooOftenError, match=words):
        replay(config, recorder=rows)
    assert rows.of_kind("step")[-1]["step"] == last
    assert [row["skipped"] for row in rows.of_kind("step")][:6] == [False, False, True, True, True, True]


def give_up(process: Process, config: RunConfig) -> tuple[str, int]:
    """The reason for which a process of a run ends, and the rows of its steps."""
    rows = Rows()
    with pytest.MonkeyPatch.context() as patch:
        spoil_gradients(patch, when=lambda weights: newest_version(weights) >= 2, data_rank=1)
        with pytest.raises(SkippedTooOftenError) as ended:
            train(config, process=process, recorder=rows)
    return str(ended.value), len(rows.of_kind("step"))


@pytest.mark.slow
def test_all_processes_of_a_run_end_with_the_same_reason() -> None:
    config = small_config("2bw", data=2, steps=9, **{"train.max_skipped": 3})
    ends = [end for (end,) in in_processes(give_up, [config], size=4)]
    assert {reason for reason, _ in ends} == {ends[0][0]}
    assert ends[0][0].startswith("the gradient was not finite in 3 updates in a row, up to update 5")
    assert sorted(count for _, count in ends) == [0, 0, 0, 6]


@pytest.mark.parametrize(("schedule", "clip"), [("2bw", "global"), ("paci", "stage")])
@pytest.mark.parametrize("data", [1, 2])
def test_weights_that_are_not_finite_are_named(
    schedule: str, clip: str, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the gradient, which is not finite because of them. Stage 0 is skipped first, or only."""
    config = small_config(schedule, data=data, layers=2, clip=clip, steps=20, **{"train.max_skipped": 3})
    apply = StageUpdate.apply

    def spoiled(self: StageUpdate, gradient: GradientBuffer, *, version: int, **given: Any) -> UpdateResult:
        members = dict(zip(self._weights.master.names, self._weights.master.parameters, strict=True))
        if version == 3 and "blocks.1.mlp_norm.weight" in members:
            members["blocks.1.mlp_norm.weight"].detach()[-1] = float("nan")
        return apply(self, gradient, version=version, **given)

    monkeypatch.setattr(StageUpdate, "apply", spoiled)
    words = (
        r"the weights of stage 1 are not finite \(blocks.1.mlp_norm.weight\), so the gradient .* in 3 updates"
    )
    with pytest.raises(SkippedTooOftenError, match=words):
        replay(config, recorder=Rows())


def test_the_validation_loss_does_not_depend_on_who_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights everywhere, since no step is taken."""
    spoil_gradients(monkeypatch, when=lambda weights: True, data_rank=0)
    losses = set()
    errors = set()
    for data in (1, 2, 3, 7):
        config = small_config("2bw", data=data, layers=2, steps=2)
        config = changed(config, {"train.max_skipped": 0, "train.eval_microbatches": 5})
        rows = replayed(config)
        losses.add(tuple(rows.result.val_losses))
        errors.add(tuple(row["val_loss_error"] for row in rows.of_kind("eval")))
    assert len(losses) == len(errors) == 1
    config = changed(config, {"train.eval_microbatches": 1})
    rows = replayed(config)
    assert [row["val_loss_error"] for row in rows.of_kind("eval")] == [None]
