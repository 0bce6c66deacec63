"""Replicas of the pipeline: in processes and in replay the same bits, and what one process computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed import check_resumed, go_back, saving
from support.single_process import check_against_one_process, joined
from support.small_runs import (
    Rows,
    in_processes,
    newest_version,
    replayed,
    small_config,
    spoil_gradients,
    with_experts,
)
from support.training_cases import OPTIMIZERS, SCHEDULES, measured

import stages.comm.reduction_rounds
from stages.comm.process import Process
from stages.config.run_config import CorrectionConfig, RunConfig
from stages.shape.optimizer_sharding import assign_owners
from stages.trainer import replay, train
from stages.training_loop import SkippedTooOftenError


def of_every_schedule(*, data: int) -> list[RunConfig]:
    return [
        small_config(
            schedule,
            data=data,
            microbatches=4,
            layers=2 * options.get("chunks", 1),
            optimizer=OPTIMIZERS[schedule][0],
            coefficient=OPTIMIZERS[schedule][1],
            clip_norm=0.3,
            **options,
        )
        for schedule, options in SCHEDULES.items()
    ]


def in_a_v(*, data: int) -> list[RunConfig]:
    """2bw-v with whole and with split backwards."""
    return [
        small_config(
            "2bw-v",
            data=data,
            microbatches=4,
            optimizer=optimizer,
            coefficient=1.0,
            clip_norm=0.3,
            split=split,
        )
        for split, optimizer in ((False, "adamw"), (True, "muon"))
    ]


@dataclass(frozen=True)
class Job:
    """What processes are to do, one after another."""

    config: RunConfig
    checkpoints: Path | None = None
    """Train, go back to the checkpoint of step 2, and train on."""
    spoiled_from: int | None = None
    """Update from which on no gradient is finite."""
    in_small_rounds: bool = False
    """Exchange gradients in many rounds, of which several begin within the last backward of a flush."""


def do(process: Process, job: Job) -> list[list[dict[str, Any]]] | str:
    rows, again = Rows(), Rows()
    with pytest.MonkeyPatch.context() as patch:
        if job.in_small_rounds:
            patch.setattr(stages.comm.reduction_rounds, "ROUND_BYTES", 2048)
            patch.setattr(stages.comm.reduction_rounds, "LEAST_PIECE", 1)
        if job.spoiled_from is not None:
            first = job.spoiled_from
            spoil_gradients(patch, when=lambda weights: newest_version(weights) >= first, data_rank=1)
        try:
            train(job.config, process=process, recorder=rows, checkpoints=job.checkpoints)
        except SkippedTooOftenError as error:
            return f"{len(rows.of_kind('step'))} rows: {error}"
    if job.checkpoints is not None:
        process.gather(None)
        if process.rank == 0:
            go_back(job.checkpoints, 2)
        process.gather(None)
        train(job.config, process=process, recorder=again, checkpoints=job.checkpoints)
    return [measured(rows), measured(again)]


@pytest.mark.slow
def test_processes_of_two_data_ranks(tmp_path: Path) -> None:
    """Every schedule; and two that go on from a checkpoint, a V, and one that gives up."""
    configs = of_every_schedule(data=2)
    folded = in_a_v(data=2)
    resumed = [saving(config) for config in configs if config.schedule.name in ("2bw", "paci")]
    diverging = small_config("2bw", data=2, steps=9)
    diverging.train.max_skipped = 3
    jobs = [
        *(Job(config, in_small_rounds=True) for config in configs),
        *(Job(config, checkpoints=tmp_path / config.schedule.name) for config in resumed),
        *(Job(config, in_small_rounds=True) for config in folded),
        Job(diverging, spoiled_from=2),
    ]
    by_rank = in_processes(do, jobs, size=4)

    # Stage 1 is on processes 2 and 3, and of its data ranks the first writes.
    for config, rank_0, rank_1, writer, rank_3 in zip(configs, *by_rank, strict=False):
        assert rank_0 == rank_1 == rank_3 == [[], []]
        rows = replayed(config)
        assert writer[0] == measured(rows), config
        assert max(row["grad_norm"] for row in rows.of_kind("step")) > config.train.clip_norm
        assert rows.digest

    for whole, again in by_rank[2][len(configs) : -1 - len(folded)]:
        check_resumed(whole, again, step=2)

    # The last stage of a V is on the first pipeline rank.
    for config, (writer, _) in zip(folded, by_rank[0][-1 - len(folded) : -1], strict=True):
        rows = replayed(config)
        assert writer == measured(rows), config
        assert rows.digest

    reasons = [outcomes[-1] for outcomes in by_rank]
    assert reasons[2].startswith("6 rows: the gradient was not finite in 3 updates in a row, up to update 5")
    assert {reason.partition(": ")[2] for reason in reasons} == {reasons[2].partition(": ")[2]}


@pytest.mark.slow
def test_processes_of_three_data_ranks_add_in_the_order_of_the_ranks() -> None:
    """Around a ring, parts of the gradient would be added in other orders."""
    config = small_config("2bw", stages=1, data=3, optimizer="muon", clip_norm=0.3)
    by_rank = in_processes(do, [Job(config, in_small_rounds=True)], size=3)
    rows = replayed(config)
    assert by_rank[0][0][0] == measured(rows)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("soap", {}),
        ("basis-rotation", {}),
        ("basis-rotation", {"source": "first-moment"}),
        ("basis-rotation", {"geometry": "unilateral"}),
    ],
)
@pytest.mark.slow
def test_rotations_do_not_depend_on_the_layout(optimizer: str, options: dict[str, Any]) -> None:
    """Gradients of rank below their size: no axis of a null space comes from rounding, in 40 steps. Axes are
    exact to eps^(1/4), 1e-4, at worst (`in_range`), and a step is 5e-3."""
    runs = []
    for data in (1, 2):
        config = small_config(
            "2bw",
            data=data,
            microbatches=4 // data,
            optimizer=optimizer,
            steps=40,
            eval_interval=40,
            precision="float64",
        )
        config.optimizer.options = {**options}
        runs.append(replay(with_experts(config), recorder=Rows()))
    assert runs[0].train_losses == pytest.approx(runs[1].train_losses, rel=1e-7)
    assert runs[0].val_losses == pytest.approx(runs[1].val_losses, rel=1e-7)
    weights = [joined(run.weights) for run in runs]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=5e-3 * 1e-2)


@pytest.mark.slow
def test_delay_compensation_acts_on_the_sum() -> None:
    config = small_config("2bw", data=2, steps=5, precision="float64")
    config.correction = CorrectionConfig(name="delay-compensation", strength=30.0)
    check_against_one_process(config, delay=1, compensation=30.0)


def test_parameters_are_shared_out_whole_and_evenly() -> None:
    shapes = [(size,) for size in (7, 100, 30, 40, 30, 1)]
    shared = assign_owners(shapes, data_ranks=3)
    assert shared.owned == ((1,), (0, 3, 5), (2, 4))
    assert shared.order == (1, 0, 3, 5, 2, 4)
    assert shared.runs == (((0, 100),), ((100, 148),), ((148, 208),))
    assert assign_owners(shapes, data_ranks=1).order == (0, 1, 2, 3, 4, 5)
    many = assign_owners(shapes, data_ranks=8)
    assert sorted(many.order) == [0, 1, 2, 3, 4, 5]
    assert many.owned[6:] == ((), ())
    assert many.parts[-3:] == (1, 0, 0)
