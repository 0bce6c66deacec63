"""What the planner says a stage holds is what runs measure, tensor by tensor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from support.small_runs import Rows, in_processes, small_config, with_experts

from asyncpp_cli.planner.costs.devices import find_device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.estimate import Estimate, estimate
from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.trainer import replay, train

COSTS = Roofline(find_device("h100", key=""))
KINDS = ("weights", "master", "gradients", "optimizer", "correction", "activations", "recomputed")


def cases() -> list[RunConfig]:
    mixture = {"shared_experts": 1, "dense_layers": 1}
    many: list[dict[str, Any]] = [
        {"schedule": "1f1b", "recompute": "selective", "precision": "bfloat16"},
        {"schedule": "gpipe", "recompute": "full"},
        {"schedule": "zero-bubble", "optimizer": "muon"},
        {"schedule": "2bw", "precision": "bfloat16"},
        {"schedule": "2bw", "coefficient": 1.0, "form": "buffered", "recompute": "full", "ema_decay": 0.9},
        {"schedule": "pipedream", "clip": "stage", "optimizer": "soap"},
        {"schedule": "paci", "clip": "stage", "precision": "bfloat16", "recompute": "full"},
        {"schedule": "2bw-v", "layers": 6, "recompute": "selective"},
        {"schedule": "2bw", "cut": [1.5, 2.5], "recompute": "full"},
        {"schedule": "2bw-v", "split": True, "precision": "bfloat16"},
        {"schedule": "paci-v", "clip": "stage", "ahead": 2},
        {"schedule": "2bw", "shard_head": True},
        {"schedule": "1f1b", "shard_head": True, "tied": True},
        {"schedule": "2bw", "shard_head": True, "tied": True},
        {"schedule": "2bw-v", "shard_head": True, "precision": "bfloat16", "layers": 6},
    ]
    configs = [small_config(microbatches=6, steps=4, eval_interval=9, **one) for one in many]
    return configs + [with_experts(config, **mixture) for config in configs[2:5]]


def planned(config: RunConfig) -> Estimate:
    config.site.device = "cpu"
    return estimate(config, COSTS, limit_gb=None)


def held(process: Process, config: RunConfig) -> dict[str, list[int]]:
    rows = Rows()
    train(config, process=process, recorder=rows)
    return rows.of_kind("segment")[-1]["memory"] if rows.rows else {}


@pytest.mark.slow
def test_memory_is_within_five_percent_of_what_processes_hold() -> None:
    configs = cases()
    by_rank = in_processes(held, configs, size=2)
    for config, *of_ranks in zip(configs, *by_rank, strict=True):
        (memory,) = filter(None, of_ranks)  # from the rank of the last stage
        plan = planned(config)
        lasting = [0, 0]
        for stage, (rank, of_stage) in enumerate(zip(plan.rank_of_stage, plan.stages, strict=True)):
            assert asdict(of_stage) == {kind: memory[kind][stage] for kind in KINDS}
            lasting[rank] += of_stage.total
        for rank, of_rank in enumerate(plan.memory):
            assert of_rank["reduction"] == memory["reduction"][rank] == 0
            assert of_rank["activations"] <= memory["rank_activations"][rank]
            lasting[rank] += of_rank["messages"]
        assert lasting == pytest.approx(memory["total"], rel=0.05)


@pytest.mark.slow
def test_room_for_reductions_is_what_processes_hold() -> None:
    """A flush exchanges early, in smaller rounds, and `2bw` afterwards; both have the same buffers."""
    configs = [
        small_config(schedule, stages=1, data=2, precision=precision)
        for schedule, precision in (("1f1b", "float32"), ("2bw", "bfloat16"))
    ]
    measured = in_processes(held, configs, size=2)[0]
    for config, memory in zip(configs, measured, strict=True):
        (of_stage,) = planned(config).memory
        assert [of_stage["reduction"]] == memory["reduction"]
        assert of_stage["reduction"] > 0


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "options"),
    [
        ("1f1b", 4, 16, {"layers": 6}),
        ("2bw", 4, 2, {"delay": 2}),
        ("2bw", 4, 12, {"ahead": 2}),
        ("2bw", 3, 32, {"data": 2, "optimizer": "muon", "ema_decay": 0.9}),
        ("pipedream", 4, 12, {"clip": "stage", "update_interval": 3}),
        ("pipedream", 3, 24, {"clip": "stage"}),
        ("paci", 4, 8, {"clip": "stage", "data": 3}),
        ("interleaved-1f1b", 2, 4, {"chunks": 2}),
        ("looped-bfs", 2, 5, {"chunks": 2}),
        ("zb-v", 2, 8, {}),
        ("v-half", 2, 9, {}),
        ("v-min", 3, 12, {"layers": 6}),
        ("paci-v", 3, 12, {"layers": 6, "clip": "stage", "update_interval": 2}),
        ("2bw-v", 3, 12, {"layers": 8, "data": 2}),
        ("2bw-v", 2, 12, {"ahead": 2}),
        ("2bw-v", 2, 3, {"split": True, "precision": "bfloat16", "ema_decay": 0.9}),
        ("2bw-v", 3, 8, {"split": True, "ahead": 2, "layers": 6}),
        ("dualpipe-v", 2, 9, {"precision": "bfloat16"}),
        ("1f1b", 4, 16, {"layers": 6, "shard_head": True}),
        ("2bw", 4, 20, {"shard_head": True, "precision": "bfloat16", "recompute": "full"}),
        ("2bw", 3, 12, {"shard_head": True, "ahead": 2, "data": 2}),
        ("2bw-v", 3, 16, {"shard_head": True, "layers": 8, "data": 2}),
        ("2bw-v", 2, 8, {"shard_head": True, "split": True, "precision": "bfloat16"}),
        ("zb-v", 2, 8, {"shard_head": True}),
        ("1f1b", 4, 16, {"shard_head": True, "tied": True, "precision": "bfloat16"}),
        ("zb-v", 3, 12, {"layers": 6, "shard_head": True, "tied": True, "data": 2}),
        ("2bw", 4, 4, {"shard_head": True, "tied": True}),
        ("2bw", 1, 6, {"shard_head": True, "tied": True}),
        ("2bw-v", 3, 16, {"shard_head": True, "tied": True, "layers": 8, "data": 2}),
        ("v-half", 2, 9, {"shard_head": True}),
    ],
)
@pytest.mark.slow
def test_memory_of_deeper_and_wider_layouts(
    schedule: str, stages: int, microbatches: int, options: dict[str, Any]
) -> None:
    """Every kind to the byte, though the planner looks at a short program in place of the run's own."""
    delay = options.pop("delay", 1)
    config = small_config(
        schedule, stages=stages, microbatches=microbatches, steps=4, eval_interval=9, **options
    )
    config.schedule.delay = delay
    check_as_planned(config)


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize(
    ("schedule", "cut", "options"),
    [
        ("2bw", [1.5, 1, 1.5], {"precision": "bfloat16", "data": 2}),
        ("1f1b", [2.5, 1.5, 0], {"recompute": "full"}),
        ("zero-bubble", [0.5, 1, 2.5], {"recompute": "selective"}),
        ("2bw-v", [1.5, 1, 1, 0.5], {"split": True, "recompute": "full"}),
        ("interleaved-1f1b", [0.5, 1.5, 0.5, 1.5], {"chunks": 2, "recompute": "selective"}),
    ],
)
def test_memory_of_stages_that_begin_and_end_within_a_block(
    schedule: str, cut: list[float], options: dict[str, Any], mixture: bool
) -> None:
    stages = len(cut) if len(cut) == 3 else len(cut) // 2
    config = small_config(schedule, stages=stages, cut=cut, microbatches=2 * stages, steps=4, **options)
    check_as_planned(with_experts(config, shared_experts=1, dense_layers=1) if mixture else config)


def check_as_planned(config: RunConfig) -> None:
    rows = Rows()
    replay(config, recorder=rows)
    memory = rows.of_kind("segment")[-1]["memory"]
    plan = planned(config)
    for stage, of_stage in enumerate(plan.stages):
        assert asdict(of_stage) == {kind: memory[kind][stage] for kind in KINDS}
    held = [of_rank["activations"] for of_rank in plan.memory]
    assert all(here <= most for here, most in zip(held, memory["rank_activations"], strict=True))


@pytest.mark.parametrize("schedule", ["2bw", "2bw-v"])
def test_a_gpu_has_a_second_gradient_buffer_where_backwards_overtake_the_verdict(schedule: str) -> None:
    config = small_config(schedule, stages=1, microbatches=4, steps=4, eval_interval=9)
    on_cpu = planned(config)
    config.site.device = "cuda"
    on_gpu = estimate(config, COSTS, limit_gb=None)
    assert [kinds["gradients"] for kinds in on_gpu.memory] == [
        2 * kinds["gradients"] for kinds in on_cpu.memory
    ]
