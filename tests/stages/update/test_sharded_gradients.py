"""`parallel.shard_gradients`: the same bits and the same order with a part of the second gradient buffer."""

from __future__ import annotations

from typing import Any

import pytest
from support.planned import planned
from support.recorded_host import check_streams, record, tiny_run
from support.small_runs import Rows, in_processes, replayed, small_config, trained_here, with_experts
from support.stream_model import hangs, hangs_where_one_syncs, unordered
from support.training_cases import measured

from stages.config.limits import ConfigError
from stages.config.run_config import RunConfig, changed
from stages.resolve.schedule import resolve_schedule
from stages.update.async_update import RankUpdates

CASES: list[dict[str, Any]] = [
    {"schedule": "2bw", "optimizer": "muon"},
    {"schedule": "2bw", "ahead": 2, "data": 3, "precision": "bfloat16"},
    {"schedule": "2bw", "delay": 2, "stages": 1, "coefficient": 1.0},
    {"schedule": "2bw-v", "split": True},
    {"schedule": "2bw-v", "stages": 1, "recompute": "full"},
    {"schedule": "pipedream", "update_interval": 1},
]


def config_of(*, shard: bool = True, data: int = 2, stages: int = 2, **options: Any) -> RunConfig:
    config = small_config(stages=stages, data=data, microbatches=4, steps=5, eval_interval=5, **options)
    return changed(config, {"parallel.shard_gradients": shard})


def numbers(rows: Rows) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key != "memory"} for row in measured(rows)]


def gradient_bytes(rows: Rows) -> list[int]:
    return list(rows.memory["gradients"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_in_less_memory_which_is_planned(case: dict[str, Any]) -> None:
    for experts in (False, True) if case is CASES[0] else (False,):
        whole, sharded = (config_of(shard=shard, **case) for shard in (False, True))
        if experts:
            whole, sharded = with_experts(whole), with_experts(sharded)
        before, after = replayed(whole), replayed(sharded)
        assert numbers(after) == numbers(before)
        for config, rows in ((whole, before), (sharded, after)):
            assert gradient_bytes(rows) == [of_stage.gradients for of_stage in planned(config).stages]
        # A stage of one buffer stays as it is: of `pipedream` the last one.
        assert gradient_bytes(after)[0] < gradient_bytes(before)[0]


def test_the_second_buffer_holds_the_part_of_the_data_rank_that_owns_most() -> None:
    config = config_of(schedule="2bw")
    memory = replayed(config).memory
    parameters = [
        weights // versions // 4
        for weights, versions in zip(memory["weights"], memory["versions"], strict=True)
    ]
    owned = [master // 4 for master in memory["master"]]
    assert memory["gradients"] == [4 * (whole + part) for whole, part in zip(parameters, owned, strict=True)]


@pytest.mark.slow
def test_processes_compute_the_bits_of_replay() -> None:
    configs = [config_of(**case) for case in CASES if case.get("data", 2) * case.get("stages", 2) == 4]
    by_rank = in_processes(trained_here, configs, size=4)
    for config, *of_ranks in zip(configs, *by_rank, strict=True):
        (rows,) = [rows for rows in of_ranks if rows.rows]
        alone = replayed(config)
        assert (rows.digest, gradient_bytes(rows)) == (alone.digest, gradient_bytes(alone))


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_streams_are_ordered_and_nothing_hangs(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run(config_of(**case | {"precision": "float32"}))
    check_streams(config, monkeypatch)
    recording = record(config, monkeypatch)
    assert hangs(recording) == []
    for number in range(len(recording.events)):
        assert hangs_where_one_syncs(recording, number) == []


def test_a_backward_that_does_not_wait_for_the_reduction_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_run(config_of(schedule="2bw"))
    monkeypatch.setattr(RankUpdates, "_free_buffer", lambda updates, before: iter(()))
    assert any(unordered(events) for events in record(config, monkeypatch, uses=True).events)


def test_it_is_refused_where_there_is_nothing_to_shard() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.data is 1"):
        resolve_schedule(config_of(schedule="2bw", data=1))
    for schedule in ("1f1b", "gpipe"):
        with pytest.raises(ConfigError, match=f"{schedule} has one"):
            resolve_schedule(config_of(schedule=schedule))
    for case in CASES:
        resolve_schedule(config_of(**case))
