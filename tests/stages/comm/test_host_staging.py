"""What processes that share a GPU do: the copies are of tensors of the host here, the rest is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.small_runs import small_config
from support.training_cases import check_processes_are_replays, train_here

from stages.comm.process import Process
from stages.config.run_config import RunConfig


def train_through_host(process: Process, config: RunConfig) -> list[dict[str, Any]]:
    """The rows, whose first says that the processes share a GPU."""
    rows = train_here(replace(process, host_staged=True), config)
    for start in rows[:1]:
        assert start["shared_gpu"]
        start["shared_gpu"] = False
    return rows


@pytest.mark.slow
def test_a_run_through_the_hosts_memory_is_its_replay() -> None:
    configs = [
        small_config("2bw", microbatches=4, precision="bfloat16"),
        small_config("paci", microbatches=4),
        small_config("2bw", stages=1, data=2),
        small_config("1f1b", stages=1, data=2, precision="bfloat16"),
        small_config("paci", stages=1, data=2),
    ]
    check_processes_are_replays(configs, size=2, train=train_through_host)
