"""The pipeline against one process that has the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.single_process import (
    batches,
    check_against_one_process,
    check_first_gradient,
    first_step_gradient,
    step_gradient,
    whole_model,
)
from support.small_runs import ranks_of, replayed, small_config
from support.training_cases import SHARDED, named, within_blocks
from torch import Tensor

from schedules import FAMILY
from stages.config.run_config import changed
from stages.resolve.facts import facts
from stages.resolve.schedule import can_tie
from stages.shape.partition import cut_model

SYNCHRONOUS = tuple(name for name, schedule in FAMILY.items() if schedule.synchronous)
SHARDS = {"shard_head": True, "vocab_size": 259}
"""A vocabulary that is divided by none of 2, 3 and 4."""

LAYOUTS = [
    *((schedule, "llama", stages) for schedule in SYNCHRONOUS for stages in (2, 4)),
    *((schedule, "llama", 1) for schedule in ("1f1b", "zero-bubble", "zb-v")),
    *((schedule, "qwen3", 2) for schedule in ("1f1b", "zero-bubble")),
    *((schedule, "experts", stages) for schedule in ("1f1b", "zero-bubble") for stages in (1, 4)),
    *((schedule, "tied", 2) for schedule in can_tie()),
    *((schedule, "tied", 1) for schedule in ("2bw-v", "1f1b", "zero-bubble")),
]
LAYOUTS_OF_SHARDS = [
    *((schedule, "llama", 2) for schedule in SHARDED),
    *((schedule, "tied", 2 + number % 2) for number, schedule in enumerate(SHARDED)),
    *(("1f1b", family, stages) for family, stages in (("qwen3", 4), ("experts", 3), ("mup", 3))),
    *(("1f1b", family, 1) for family in ("llama", "tied")),
    *(("zb-v", family, stages) for family, stages in (("experts", 4), ("mup", 2))),
    ("v-half", "qwen3", 3),
]
WITHIN_BLOCKS = [("1f1b", "llama", 4), ("zb-v", "qwen3", 2), ("zero-bubble", "experts", 4)]
GRADIENTS: list[dict[str, Any]] = [
    {"schedule": schedule, "family": family, "stages": stages} | options
    for layouts, options in (
        (LAYOUTS, {}),
        (WITHIN_BLOCKS, {"cut": within_blocks(layers=8, stages=4)}),
        (LAYOUTS_OF_SHARDS, SHARDS),
        ([("2bw-v", "tied", 2)], {"split": True}),
    )
    for schedule, family, stages in layouts
]


@pytest.mark.parametrize("case", GRADIENTS, ids=named)
def test_the_first_gradient_is_that_of_a_single_process(case: dict[str, Any]) -> None:
    """At the initial weights, under whatever delay."""
    microbatches = 8 if case["schedule"] == "dualpipe-v" else 4
    config = small_config(microbatches=microbatches, layers=8, precision="float64", **case)
    check_first_gradient(config, first_step_gradient(config))


RUNS: list[dict[str, Any]] = [
    *(
        {"schedule": name, "optimizer": "muon", "microbatches": 5}
        for name in ("v-half", "v-min", "dualpipe-v")
    ),
    *(
        {"schedule": schedule, "stages": 3, "microbatches": 3, "optimizer": optimizer, "coefficient": c}
        for schedule, c, optimizer in (
            *(("1f1b", 0.0, "adamw"), ("gpipe", 0.0, "muon"), ("2bw", 0.0, "muon"), ("2bw", 0.5, "adamw")),
            *(("2bw", 1.0, "adamw"), ("2bw", 1.0, "muon")),
        )
    ),
    {"schedule": "1f1b", "stages": 3, **SHARDS},
    {"schedule": "zb-v", "optimizer": "muon", **SHARDS},
    {"schedule": "2bw", "stages": 3, "optimizer": "muon", "coefficient": 1.0, **SHARDS},
    {"schedule": "2bw", "stages": 4, "optimizer": "lion", **SHARDS},
    {"schedule": "2bw-v", "stages": 3, "split": True, **SHARDS},
    {"schedule": "2bw", "family": "mup", "stages": 3, "optimizer": "muon", "coefficient": 1.0, **SHARDS},
    {"schedule": "1f1b", "family": "tied", "stages": 3, "optimizer": "muon", **SHARDS},
    {"schedule": "zb-v", "family": "tied", **SHARDS},
    {"schedule": "2bw", "family": "tied", "optimizer": "muon", "coefficient": 1.0, **SHARDS},
    {"schedule": "2bw-v", "family": "tied", "stages": 3, "split": True, **SHARDS},
    {"schedule": "2bw-v", "family": "tied", "data": 2, "optimizer": "muon", "coefficient": 1.0},
    {"schedule": "2bw-v", "family": "tied", "split": True, "coefficient": 0.5},
    {"schedule": "zb-v", "family": "tied", "data": 2},
    {"schedule": "dualpipe-v", "family": "tied", "optimizer": "muon"},
    {"schedule": "zero-bubble", "family": "tied", "stages": 1, "data": 2},
    {"schedule": "2bw", "family": "tied", "stages": 1, "coefficient": 1.0},
    {"schedule": "1f1b", "data": 2, "microbatches": 2},
    {"schedule": "zero-bubble", "data": 3, "optimizer": "muon", "microbatches": 2},
    {"schedule": "2bw", "data": 2, "optimizer": "muon", "coefficient": 1.0, "microbatches": 2},
    {"schedule": "2bw", "data": 3, "coefficient": 0.5, "form": "buffered", "microbatches": 2},
    # More data ranks than a stage has parameters: some own none.
    {"schedule": "2bw", "data": 12, "optimizer": "muon", "coefficient": 1.0, "layers": 2, "clip_norm": 0.2},
    {"schedule": "2bw", "family": "mup", "cut": [1.5, 2.5], "data": 2, "optimizer": "muon"},
    {"schedule": "2bw-v", "family": "mup", "tied": True},
    {"schedule": "zero-bubble", "family": "mup"},
]


@pytest.mark.parametrize("case", RUNS, ids=named)
def test_a_run_is_the_recurrence_written_out_on_one_process(case: dict[str, Any]) -> None:
    settings = {"microbatches": 4, "steps": 6, "precision": "float64", "clip_norm": 0.5} | case
    config = small_config(**settings)
    if settings.get("family") == "mup" and not settings.get("shard_head"):
        config = changed(config, {"model.logit_softcap": 3.0, "train.clip_norm": 0.05})
    check_against_one_process(config, delay=1 if case["schedule"].startswith("2bw") else 0)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.slow
def test_drains_change_no_weights(schedule: str) -> None:
    seldom, often = (small_config(schedule, steps=6, eval_interval=interval) for interval in (6, 1))
    assert (len(facts(seldom).segments()), len(facts(often).segments())) == (1, 6)
    assert replayed(seldom).digest == replayed(often).digest


def test_weights_at_the_start_do_not_depend_on_the_cut() -> None:
    def initial(stages: int) -> dict[str, Tensor]:
        return {
            name: parameter.detach()
            for rank in ranks_of(small_config(stages=stages))
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
    config = small_config(clip=clip, steps=1, precision="float64")
    gradient, _ = step_gradient(
        whole_model(config, dtype=torch.float64), batches(config), step=0, microbatches=2
    )
    # The last stage reports.
    last = cut_model(config.model, stages=2, context=config.data.context)[-1]
    held = ("norm.", "head.", *(f"blocks.{index}." for index in last.blocks))
    parts = [part.flatten() for name, part in gradient.items() if clip == "global" or name.startswith(held)]
    expected = None if clip == "none" else pytest.approx(float(torch.cat(parts).norm()), rel=1e-10)
    assert replayed(config).of_kind("step")[0]["grad_norm"] == expected
