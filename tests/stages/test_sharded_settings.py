"""What `fsdp` and `hsdp` accept, and what is planned for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.small_runs import small_config

from asyncpp_cli.planner.sharding import memory_of_run
from asyncpp_cli.sites.resources import ranks_of
from stages.config.run_config import RunConfig, changed
from stages.config.segments import as_data_ranks, as_trained
from stages.resolve.checks import ConfigError, check


def config_of(name: str = "fsdp", **settings: Any) -> RunConfig:
    return small_config(name, stages=2, data=2, microbatches=4, **settings)


@pytest.mark.parametrize(
    ("changes", "key", "accepted"),
    [
        ({"schedule.microbatches": 3}, "schedule.microbatches", "a multiple of 2, such as 2 or 4"),
        ({"schedule.name": "hsdp", "schedule.replicas": 3}, "schedule.replicas", "accepted: 2"),
        ({"schedule.name": "hsdp", "schedule.replicas": 4}, "schedule.replicas", "accepted: 2"),
        ({"parallel.shard_head": True}, "parallel.shard_head", "accepted with it: false"),
        ({"train.cuda_graphs": True, "site.device": "auto"}, "train.cuda_graphs", "accepted with it: false"),
        ({"error_feedback.coefficient": 1.0}, "error_feedback", "accepted with it: false"),
        ({"parallel.shard_gradients": True}, "parallel.shard_gradients", "accepted with it: false"),
    ],
)
def test_what_shards_cannot_do_is_refused_by_its_key(
    changes: dict[str, Any], key: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(changed(config_of(), changes))
    assert refused.value.key == key
    assert accepted in str(refused.value)


def test_processes_are_data_ranks_of_one_stage() -> None:
    config = replace(config_of(), parallel=replace(config_of().parallel, cut=[1, 3]))
    check(config)
    trained = as_trained(config)
    assert (trained.parallel.stages, trained.parallel.data, trained.parallel.cut) == (1, 4, None)
    assert trained.schedule.microbatches == 2
    assert as_trained(trained) == trained
    assert ranks_of(config) == 4
    assert as_data_ranks(config).schedule.name == "1f1b"
    assert as_trained(config_of("2bw")) == config_of("2bw")


def test_shards_of_more_processes_take_less() -> None:
    of = {
        (name, kept): memory_of_run(changed(config_of(name), {"schedule.keep_weights": kept}))
        for name in ("fsdp", "hsdp")
        for kept in (False, True)
    }
    assert of["fsdp", False]["master"] < of["hsdp", False]["master"]
    assert sum(of["fsdp", False].values()) < sum(of["fsdp", True].values())
