"""Streams and late copies change no numbers: what one stream, communicator or rank writes, another one reads
only after an event, a wait or the host. Checked by vector clocks of a recorded run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recorded_host import RecordedStreams, check_streams, record, record_replay, tiny_run
from support.small_runs import small_config, with_experts
from support.stream_model import unordered
from support.training_cases import SCHEDULES, TWO_STAGES_A_RANK

import stages.pipeline.build
from stages.config.run_config import RunConfig
from stages.resolve.facts import Resolved, facts
from stages.update.update_stream import Streams

ALL: dict[str, dict[str, Any]] = SCHEDULES | TWO_STAGES_A_RANK
LAYOUTS = [(1, 1), (2, 2)]


def config_of(schedule: str, *, stages: int = 2, data: int = 1) -> RunConfig:
    settings = {"microbatches": 2 * max(stages, 2), "layers": 2 * stages, "steps": 3}
    return small_config(schedule, stages=stages, data=data, **settings, **ALL[schedule])


def use_buffers(patch: pytest.MonkeyPatch, *, on_gpu: bool) -> None:
    """Gradient buffers of either device."""
    of_device = Resolved.gradient_buffers
    patch.setattr(Resolved, "gradient_buffers", lambda run, **_: of_device(run, on_gpu=on_gpu))


@pytest.mark.parametrize("schedule", ALL)
def test_streams_of_a_run_and_its_replay_are_ordered(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for stages_, data in LAYOUTS:
        config = tiny_run(config_of(schedule, stages=stages_, data=data))
        of_cpu, of_gpu = (facts(config).gradient_buffers(on_gpu=on_gpu) for on_gpu in (False, True))
        for on_gpu in sorted({False, of_cpu != of_gpu}):
            with monkeypatch.context() as patch:
                use_buffers(patch, on_gpu=on_gpu)
                check_streams(config, patch)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream-unstashed"])
@pytest.mark.slow
def test_so_are_those_of_a_model_with_experts(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(schedule, stages=1, data=2)
    check_streams(with_experts(config, balance_rate=0.02), monkeypatch)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("schedule", "stages_", "microbatches"), [("2bw", 3, 1), ("2bw-v", 2, 2)])
@pytest.mark.slow
def test_a_tied_shard_that_gathers_ahead_waits_for_the_update_of_that_buffer(
    schedule: str, stages_: int, microbatches: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few micro-batches T of the step after the next may follow an update before a look-up."""
    use_buffers(monkeypatch, on_gpu=on_gpu)
    delay = -(-stages_ // microbatches) + (schedule == "2bw-v")
    settings: dict[str, Any] = {"delay": delay, "layers": 2 * stages_, "steps": 6, "eval_interval": 6}
    settings |= {"shard_head": True, "tied": True}
    check_streams(small_config(schedule, stages=stages_, microbatches=microbatches, **settings), monkeypatch)


def test_a_stream_for_each_rank_of_a_replay_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_its_own() -> Streams:
        return stages.pipeline.build.streams_of(torch.device("cuda"))

    monkeypatch.setattr(stages.pipeline.build, "OneStream", of_its_own)
    events, _ = record_replay(tiny_run(config_of("2bw")), monkeypatch, late=0)
    assert unordered(events)


@pytest.mark.parametrize("forgotten", ["fork", "join"])
def test_a_missing_wait_would_be_found(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedStreams, forgotten, lambda streams, *given: None)
    config = tiny_run(config_of("2bw", data=2))
    assert any(unordered(events) for events in record(config, monkeypatch, uses=True).events)
