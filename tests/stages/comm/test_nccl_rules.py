"""Training under NCCL's rules (`like_nccl`): it ends, with the rows of replay, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.like_nccl import nccl_rules
from support.small_runs import small_config
from support.training_cases import check_processes_are_replays, of_every_schedule, train_here

from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.config.segments import schedule_facts


def train_like_nccl(process: Process, config: RunConfig) -> list[dict[str, Any]]:
    """With late sums of one stage's gradients: the first stage's where steps are synchronous."""
    late_stage = int(not schedule_facts(config).synchronous)

    def late(name: str) -> float:
        # A group of data ranks is called "GENERATION data RANK".
        found = re.search(r"data (\d+)$", name)
        return 0.02 if found is not None and int(found[1]) == late_stage else 0.0

    with nccl_rules(late=late):
        return train_here(process, config)


def with_shards(stages: int) -> list[RunConfig]:
    settings: dict[str, Any] = {"stages": stages, "microbatches": 2 * stages, "steps": 2, "shard_head": True}
    return [
        *(small_config(name, **settings) for name in ("1f1b", "2bw", "2bw-v", "zb-v", "v-half")),
        *(small_config(name, family="tied", **settings) for name in ("1f1b", "zb-v")),
    ]


@pytest.mark.slow
def test_every_schedule_and_shards_of_the_head_train() -> None:
    configs = [*of_every_schedule(microbatches=4, steps=2), *with_shards(2)]
    check_processes_are_replays(configs, size=2, train=train_like_nccl)


@pytest.mark.slow
def test_three_shards_of_the_head_train() -> None:
    check_processes_are_replays(with_shards(3), size=3, train=train_like_nccl)


@pytest.mark.slow
def test_data_ranks_train_whose_reductions_are_late() -> None:
    configs = [
        small_config("1f1b", data=2, microbatches=4, steps=2, optimizer="muon"),
        small_config("2bw", data=2, microbatches=4, steps=2, optimizer="muon", coefficient=1.0),
    ]
    check_processes_are_replays(configs, size=4, train=train_like_nccl)
