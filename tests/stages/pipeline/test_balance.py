"""Balance biases of experts: which version of them each forward and backward reads, and by which loads they
move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed import check_resumed, go_back, replay_twice, saving
from support.small_runs import (
    Rows,
    in_processes,
    newest_version,
    ranks_of,
    replayed,
    small_config,
    spoil_gradients,
    trained_here,
    with_experts,
)
from support.training_cases import DELAYED, SCHEDULES, TWO_STAGES_A_RANK, measured
from torch import Tensor

from schedules.actions import Action, Op
from stages.checkpoint.files import folder_of, read_index
from stages.comm.process import Process
from stages.config.run_config import ParallelConfig, RunConfig, changed
from stages.config.segments import segment_program
from stages.model import experts as experts_module
from stages.model.experts import route
from stages.pipeline.executor import RankExecutor, drive
from stages.resolve.facts import facts
from stages.trainer import replay
from stages.update.balance import LoadTally, moved
from stages.update.optimizer_step import StageUpdate
from stages.weights.flat_buffers import GradientBuffer
from stages.weights.weight_versions import WeightVersions

RATE = 0.25
"""So large that two versions of a bias choose differently."""


def mixture(schedule: str, *, stages: int = 2, **changed: Any) -> RunConfig:
    """A run with experts in all blocks but the first."""
    given = {"microbatches": 2 * stages, "data": 2} | (SCHEDULES | TWO_STAGES_A_RANK)[schedule] | changed
    config = small_config(schedule, stages=stages, **given)
    return with_experts(config, dense_layers=1, balance_rate=RATE)


def by_hand(bias: list[float], load: list[int], rate: float) -> list[float]:
    mean = sum(load) / len(load)
    after = [b + rate * ((mean > count) - (mean < count)) for b, count in zip(bias, load, strict=True)]
    return [b - sum(after) / len(after) for b in after]


def test_the_bias_moves_towards_an_even_load_and_is_centred() -> None:
    biases = torch.tensor([[0.5, -0.25, -0.25, 0.0], [0.0, 0.0, 0.0, 0.0]])
    loads = torch.tensor([[9, 1, 3, 7], [2, 2, 2, 2]])
    after = moved(biases, loads, rate=0.125)
    assert after.tolist() == [[0.375, -0.125, -0.125, -0.125], [0.0, 0.0, 0.0, 0.0]]
    assert after.tolist()[0] == by_hand(biases.tolist()[0], loads.tolist()[0], 0.125)
    assert after.dtype == torch.float32
    # A third of the tokens is not a number of float32, and no expert has more or less.
    assert not moved(torch.zeros(1, 3), torch.full((1, 3), 2**24 + 1), rate=1.0).any()


def test_the_load_of_a_segment() -> None:
    tally = LoadTally([3, 5], experts=4, device=torch.device("cpu"))
    assert tally.take() == {}
    tally.add(torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1]]))
    tally.add(torch.tensor([[0, 2, 2, 0], [1, 1, 1, 1]]))
    loads = tally.take()
    assert loads[3].max_over_mean == (4 + 2) / 2
    assert loads[3].entropy == pytest.approx(0.75)  # shares 1/2, 1/4, 1/4, 0: 1.5 bits of 2
    assert loads[3].never_chosen == 1
    assert (loads[5].max_over_mean, loads[5].never_chosen) == (1.0, 0)
    assert loads[5].entropy == pytest.approx(1.0)
    assert tally.take() == {}


class Routed:
    """What a replay routed by, and counted."""

    def __init__(self, config: RunConfig, patch: pytest.MonkeyPatch) -> None:
        self.biases: dict[tuple[int, int], Tensor] = {}
        """By stage and version, `(blocks, experts)`; data ranks agree."""
        self.read: dict[tuple[int, Action], list[Tensor]] = defaultdict(list)
        """By data rank and action: the bias of each routing of a block, in order."""
        self.counted: dict[tuple[int, int, int], list[Tensor]] = {}
        """By data rank, stage and micro-batch: the load of each block in its forward."""
        self.applied: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        """By stage and version: the loads of the update on each data rank."""
        now: list[tuple[int, Action]] = []

        def spied(method: str) -> None:
            perform = getattr(RankExecutor, method)

            def performed(executor: RankExecutor, action: Action) -> Iterator[None]:
                steps = perform(executor, action)
                while True:
                    # Other ranks take turns between two of its steps.
                    now[:] = [(executor._data_rank, action)]
                    try:
                        next(steps)
                    except StopIteration:
                        return
                    yield

            patch.setattr(RankExecutor, method, performed)

        def spied_route(logits: Tensor, bias: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
            weights, chosen = route(logits, bias, **settings)
            data_rank, action = now[0]
            self.read[data_rank, action].append(bias.clone())
            if action.op is Op.FORWARD:
                load = torch.bincount(chosen.flatten(), minlength=len(bias))
                self.counted.setdefault((data_rank, action.stage, action.microbatch), []).append(load)
            return weights, chosen

        overwriting_oldest = WeightVersions.overwriting_oldest

        def spied_overwriting(weights: WeightVersions, *, version: int, biases: Tensor) -> Any:
            written = self.biases.setdefault((stage_of[id(weights)], version), biases.clone())
            assert torch.equal(written, biases)
            return overwriting_oldest(weights, version=version, biases=biases)

        apply = StageUpdate.apply

        def spied_apply(update: StageUpdate, gradient: GradientBuffer, *, version: int, **given: Any) -> Any:
            self.applied[stage_of[id(update._weights)], version].append(gradient.loads.clone())
            return apply(update, gradient, version=version, **given)

        for method in ("_forward", "_backward"):
            spied(method)
        patch.setattr(experts_module, "route", spied_route)
        patch.setattr(StageUpdate, "apply", spied_apply)
        patch.setattr(WeightVersions, "overwriting_oldest", spied_overwriting)
        self.program = segment_program(config, first_step=0, steps=config.train.steps)
        ranks = ranks_of(config)
        stage_of = {id(state.weights): stage for rank in ranks for stage, state in rank.stages.items()}
        for rank in ranks:
            for stage, state in rank.stages.items():
                self.biases[stage, 0] = state.weights.newest().biases.clone()
        drive([rank.executor.run(self.program) for rank in ranks])


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", *DELAYED])
def test_forward_backward_and_recomputation_route_by_the_version_that_the_forward_read(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the loads of an update are those of its micro-batches on all data ranks, each counted once."""
    config = mixture(schedule, recompute="full", microbatches=4, steps=3)
    routed = Routed(config, monkeypatch)
    program, data = routed.program, config.parallel.data
    versions = {a.microbatch: {} for a in program.all_actions() if a.op is Op.FORWARD}
    for action in program.all_actions():
        if action.op is Op.FORWARD:
            versions[action.microbatch][action.stage] = action.version
    performed = {(rank, action) for rank, action in routed.read}
    for data_rank in range(data):
        for action in program.all_actions():
            blocks = len(routed.biases[action.stage, 0])
            if action.op not in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT) or not blocks:
                continue
            assert (data_rank, action) in performed
            expected = routed.biases[action.stage, versions[action.microbatch][action.stage]]
            read = torch.stack(routed.read[data_rank, action])
            # Backward recomputes from the last block to the first.
            assert torch.equal(read, expected if action.op is Op.FORWARD else expected.flip(0))
    for stage in range(program.num_stages):
        if not len(routed.biases[stage, 0]):
            continue
        gathered: list[int] = []
        version = 0
        for action in program.stage_actions(stage):
            if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                gathered.append(action.microbatch)
            if action.op is Op.UPDATE:
                counted = [torch.stack(routed.counted[d, stage, m]) for d in range(data) for m in gathered]
                loads = torch.stack(counted).sum(0)
                assert len(routed.applied[stage, action.version]) == data
                assert all(torch.equal(applied, loads) for applied in routed.applied[stage, action.version])
                before, after = (routed.biases[stage, v] for v in (version, action.version))
                for bias, load, written in zip(before, loads, after, strict=True):
                    expected_bias = by_hand(bias.tolist(), load.tolist(), RATE)
                    torch.testing.assert_close(written, torch.tensor(expected_bias), atol=1e-6, rtol=0)
                assert not torch.equal(before, after)
                gathered, version = [], action.version
        tokens = config.train.microbatch_size * config.data.context * config.model.active_experts
        assert int(loads[0].sum()) == tokens * data * program.update_interval


def test_a_skipped_update_leaves_the_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    config = mixture("2bw", steps=4)
    spoil_gradients(monkeypatch, when=lambda weights: newest_version(weights) == 1, data_rank=1)
    routed = Routed(config, monkeypatch)
    for stage in (0, 1):
        assert torch.equal(routed.biases[stage, 1], routed.biases[stage, 2])
        assert not torch.equal(routed.biases[stage, 2], routed.biases[stage, 3])


def test_without_balance_the_biases_stay_zero_and_loads_are_measured() -> None:
    config = mixture("2bw")
    config = changed(config, {"model.balance": "none", "model.balance_rate": None})
    rows = replayed(config)
    biases = {name: bias for name, bias in rows.result.weights.items() if name.endswith(".bias")}
    assert list(biases) == [f"blocks.{block}.experts.bias" for block in (1, 2, 3)]
    assert not any(bias.any() for bias in biases.values())
    assert rows.of_kind("segment")[0]["experts"]["max_over_mean"][0] > 1


@pytest.mark.slow
def test_a_resumed_run_without_balance_has_the_memory_of_the_whole_one(tmp_path: Path) -> None:
    """Of four versions one alone is written after the checkpoint."""
    config = saving(mixture("2bw", delay=3, steps=5))
    config = changed(config, {"model.balance": "none", "model.balance_rate": None})
    replay_twice(config, tmp_path, step=4)


def some_cases() -> list[RunConfig]:
    """With either optimizer, those with delayed gradients with error feedback."""
    return [
        mixture(
            schedule,
            steps=3,
            optimizer=("adamw", "muon")[number % 2],
            coefficient=1.0 if schedule in DELAYED else 0.0,
            recompute=("selective", "none")[number % 2],
        )
        for number, schedule in enumerate(("1f1b", "zero-bubble", "2bw", "paci", "2bw-v"))
    ]


def resume_here(process: Process, given: tuple[RunConfig, Path]) -> list[dict[str, Any]]:
    config, folder = given
    return measured(trained_here(process, config, checkpoints=folder))


@pytest.mark.slow
def test_a_distributed_run_goes_on_from_a_replay_to_its_bits(tmp_path: Path) -> None:
    """On two data ranks, which share the experts of a layer."""
    given, whole = [], []
    for number, config in enumerate(some_cases()):
        config, folder = saving(config), tmp_path / str(number)
        rows = replayed(config, checkpoints=folder)
        go_back(folder, 2)
        given.append((config, folder))
        whole.append(measured(rows))
    by_rank = in_processes(resume_here, given, size=4)
    for number, (config, _) in enumerate(given):
        writer = facts(config).programs[0].rank_of_stage[-1] * config.parallel.data
        check_resumed(whole[number], by_rank[writer][number], step=2)
    assert any(row["experts"]["max_over_mean"][-1] > 1.0 for row in whole[0] if row["kind"] == "segment")


@pytest.mark.slow
def test_biases_are_saved_by_name_and_reshard(tmp_path: Path) -> None:
    def cut(stages: int, data: int) -> RunConfig:
        config = mixture("2bw", stages=2, layers=4, microbatches=8 // data)
        config = changed(config, {"train.eval_interval": 4})
        return saving(replace(config, parallel=ParallelConfig(stages=stages, data=data)), interval=2)

    whole = replay(cut(2, 1), recorder=Rows(), checkpoints=tmp_path).weights
    go_back(tmp_path, 2)
    saved = [key for key in read_index(folder_of(tmp_path, 2)).tensors if key.endswith(".bias")]
    assert sorted(saved) == [f"version/{v}/blocks.{b}.experts.bias" for v in (1, 2) for b in (1, 2, 3)]
    for stages, data in ((1, 1), (4, 1), (2, 2)):
        rows = Rows()
        weights = replay(cut(stages, data), recorder=rows, checkpoints=tmp_path).weights
        assert rows.rows[0]["step"] == 2
        for block in (1, 2, 3):
            name = f"blocks.{block}.experts.bias"
            assert torch.equal(weights[name], whole[name])
        go_back(tmp_path, 2)
