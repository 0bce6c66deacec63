"""What processes that share a GPU do: the copies are of tensors of the host here, the rest is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_runs import Rows, in_processes, ranks_with, replayed, small_config

from stages.comm.process import Process
from stages.comm.topology import connect_in_process
from stages.config.run_config import RunConfig
from stages.pipeline.build import dtypes
from stages.pipeline.warm_up import warm_up
from stages.trainer import train
from stages.validation import check


def weights_of(rows: Rows) -> Any:
    return rows.of_kind("end")[0]["weights_sha256"] if rows.rows else None


def train_through_host(process: Process, config: RunConfig) -> Any:
    rows = Rows()
    train(config, process=replace(process, host_staged=True), recorder=rows)
    return weights_of(rows)


@pytest.mark.slow
def test_a_run_through_the_hosts_memory_is_its_replay() -> None:
    configs = [
        small_config("2bw", microbatches=4, precision="bfloat16"),
        small_config("paci", microbatches=4),
        small_config("2bw", stages=1, data=2),
        small_config("1f1b", stages=1, data=2, precision="bfloat16"),
        small_config("paci", stages=1, data=2),
    ]
    by_rank = in_processes(train_through_host, configs, size=2)
    for config, of_ranks in zip(configs, zip(*by_rank, strict=True), strict=True):
        rows = replayed(config)
        assert weights_of(rows) in of_ranks, config


def test_a_warm_up_leaves_nothing_behind() -> None:
    for options in ({"precision": "bfloat16", "recompute": "full"}, {"schedule": "zero-bubble"}):
        config = small_config(**options)
        check(config)
        for rank in ranks_with(config, connect_in_process(rank_of_stage=range(2), data_ranks=1)):
            for state in rank.stages.values():
                replica, gathering = state.weights.newest(), state.weights.gradient_buffer
                before, random = replica.flat.clone(), torch.random.get_rng_state()
                warm_up(
                    state, config, split=config.schedule.name == "zero-bubble", device=torch.device("cpu")
                )
                assert torch.equal(replica.flat, before)
                assert not gathering.flat.any()
                assert gathering.versions == []
                assert replica.pending_backwards == 0
                assert gathering.flat.dtype == dtypes(config).master
                # What was gathered into is what later backwards gather into.
                assert all(
                    parameter.grad is view
                    for parameter, view in zip(replica.parameters, gathering.views, strict=True)
                )
                assert torch.equal(torch.random.get_rng_state(), random)
