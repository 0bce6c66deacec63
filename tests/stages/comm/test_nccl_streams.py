"""Under NCCL's rules no program hangs, wherever one rank synchronises its device (`stream_model`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from support import recorded_host
from support.recorded_host import record
from support.small_runs import small_config, with_experts
from support.stream_model import (
    Begin,
    Operation,
    Recording,
    hangs,
    hangs_where_one_syncs,
    hangs_where_two_sync,
    lead_of_receives,
)

from schedules import FAMILY, ScheduleError, build
from stages.comm.device_settings import DeviceSettingError, check_environment
from stages.config.run_config import RunConfig, changed
from stages.pipeline.executor import RankExecutor

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved-1f1b": {"chunks": 2},
    "zero-bubble": {},
    "2bw": {},
    "2bw two ahead": {"ahead": 2},
    "pipedream": {"update_interval": 1},
    "pipedream-unstashed": {"update_interval": 2},
    "paci": {},
    "1f1b with head shards": {"shard_head": True},
    "2bw with head shards": {"shard_head": True},
    "2bw-v with head shards": {"shard_head": True, "split": True},
    "zb-v with head shards": {"shard_head": True},
    "1f1b with tied shards": {"shard_head": True, "tied": True},
    "zb-v with tied shards": {"shard_head": True, "tied": True},
    "2bw-v with tied shards": {"shard_head": True, "tied": True, "split": True},
}


class Case(NamedTuple):
    schedule: str
    stages: int
    microbatches: int
    data: int = 1


def cases(
    *,
    stages: tuple[int, ...],
    times: tuple[int, ...],
    data: tuple[int, ...] = (1,),
    schedules: Iterable[str] = SCHEDULES,
) -> Iterator[Case]:
    """All that can be built: `times` are micro-batches per step as multiples of the stages, and one more."""
    for schedule in schedules:
        options = SCHEDULES[schedule]
        # With shards of the head the model is a decoder, which takes longer.
        for p in stages[:2] if options.get("shard_head") else stages:
            for m in sorted({1, *(time * p for time in times), max(times) * p + 1}):
                asked = {"delay": 1 if schedule.startswith("2bw") else None}
                asked |= {key: value for key, value in options.items() if key != "clip"}
                try:
                    build(schedule.split()[0], stages=p, microbatches=m, steps=1, **asked)
                except ScheduleError:
                    continue
                yield from (Case(schedule, p, m, of_data) for of_data in data)


def config_of(case: Case) -> RunConfig:
    options = SCHEDULES[case.schedule]
    return small_config(
        case.schedule.split()[0],
        stages=case.stages,
        data=case.data,
        microbatches=case.microbatches,
        layers=case.stages * options.get("chunks", FAMILY[case.schedule.split()[0]].stages_per_rank),
        steps=3,
        optimizer="sgd",
        **options,
    )


@pytest.fixture(scope="module")
def recorded() -> Iterator[Any]:
    """Records a case; an exchange is complete no earlier than a host waits for it."""
    with pytest.MonkeyPatch.context() as patch:

        @cache
        def of(case: Case) -> Recording:
            return record(config_of(case), patch)

        yield of


def check_no_hang(recording: Recording, case: Case) -> int:
    """At how many places a rank has synchronised its device."""
    assert hangs(recording, connecting=False) == [], case
    assert hangs(recording) == [], case
    assert hangs(recording, computing=True) == [], case
    for number in range(len(recording.events)):
        assert hangs_where_one_syncs(recording, number) == [], (case, number)
    return sum(map(len, recording.events))


def check_connections(recording: Recording, case: Case) -> None:
    """A segment uses no connection for the first time."""
    for number, events in enumerate(recording.events):
        begin = events.index(Begin())
        before, within = (
            [event for event in part if isinstance(event, Operation)]
            for part in (events[:begin], events[begin:])
        )
        connected = {(event.communicator, event.kind, event.peer) for event in before}
        assert {(event.communicator, event.kind, event.peer) for event in within} <= connected, (case, number)
        sizes = {(event.communicator, event.kind, event.size) for event in before}
        collectives = [event for event in within if event.kind not in ("send", "recv")]
        assert {(event.communicator, event.kind, event.size) for event in collectives} <= sizes, (
            case,
            number,
        )


def test_owners_broadcast_all_of_their_weights_in_one_operation(monkeypatch: Any) -> None:
    config = with_experts(small_config("2bw", stages=1, data=3, layers=1, steps=2))
    recording = record(config, monkeypatch, uses=True)
    updates, connecting = config.train.steps, 1
    for events in recording.events:
        kinds = [event.kind for event in events if isinstance(event, Operation)]
        assert sum(kind.startswith("broadcast") for kind in kinds) == updates + connecting


def test_what_one_rank_exchanges_with_all_others_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would have each of the messages wait for the one before it."""
    sizes: list[int] = []

    class Counted(recorded_host._RecordedWorks):
        def __init__(self, works: Sequence[Any]) -> None:
            sizes.append(len(works))
            super().__init__(works)

    monkeypatch.setattr(recorded_host, "_RecordedWorks", Counted)
    stages, microbatches, steps = 4, 8, 2
    settings: dict[str, Any] = {"stages": stages, "microbatches": microbatches, "steps": steps}
    record(small_config("2bw", **settings, eval_interval=steps, shard_head=True), monkeypatch)
    kinds = 2  # the hidden states of a micro-batch, and the parts of its gradient
    assert sizes == [stages - 1] * kinds * microbatches * steps


def early_share(recordings: Iterable[Recording]) -> float:
    """Of the receives, those that were posted at least one whole action before the one that needs them."""
    leads = [lead for recording in recordings for lead in lead_of_receives(recording)]
    return sum(lead >= 1 for lead in leads) / len(leads)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow
def test_no_program_hangs_wherever_one_rank_synchronises_its_device(schedule: str, recorded: Any) -> None:
    # A receive of gpipe's first backward depends on the forward just before it; a flush's first on its
    # update, and with few micro-batches most are first ones.
    many = max(cases(stages=(2,), times=(4,), schedules=[schedule]))
    for case in sorted({*cases(stages=(2, 3), times=(1,), schedules=[schedule]), many}):
        check_no_hang(recorded(case), case)
        check_connections(recorded(case), case)
    assert early_share([recorded(many)]) >= (0.75 if schedule == "gpipe" else 0.9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow
def test_nor_with_data_ranks_whose_exchanges_are_late(schedule: str, recorded: Any) -> None:
    for case in cases(stages=(1, 2), times=(1,), data=(2,), schedules=[schedule]):
        if case.microbatches > 1:
            check_no_hang(recorded(case), case)
            check_connections(recorded(case), case)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if "-v" in name or "shards" in name])
@pytest.mark.slow
def test_nor_in_an_evaluation(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more micro-batches than are on their way at a time."""
    for case in cases(stages=(2, 3), times=(1,), schedules=[schedule]):
        if case.microbatches == case.stages:
            config = config_of(case)
            config = changed(config, {"train.eval_microbatches": 5})
            check_no_hang(record(config, monkeypatch, evaluates=True), case)


@pytest.mark.parametrize("schedule", ["fsdp", "hsdp"])
@pytest.mark.slow
def test_nor_do_processes_that_share_the_model(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They gather weights, reduce gradients and send matrices to owners, all in one order."""
    settings: dict[str, Any] = {"stages": 4, "microbatches": 8, "steps": 2, "eval_interval": 2}
    config = small_config(schedule, layers=2, optimizer="muon", **settings)
    recording = record(config, monkeypatch, evaluates=True)
    check_no_hang(recording, Case(schedule, stages=1, microbatches=2, data=4))
    kinds = {"data", "shards", "matrices"} | ({"replicas"} if schedule == "hsdp" else set())
    used = {
        event.communicator for events in recording.events for event in events if isinstance(event, Operation)
    }
    assert all(any(kind in name for name in used) for kind in kinds)
    # The model would see an order that differs: one process gathers before it reduces.
    first = recording.events[0]
    collectives = [place for place, event in enumerate(first) if isinstance(event, Operation)]
    here, there = next(
        (one, other)
        for one, other in pairwise(collectives)
        if first[one].communicator == first[other].communicator and first[one].kind != first[other].kind
    )
    first[here], first[there] = first[there], first[here]
    assert hangs(recording)


def test_two_ranks_that_synchronise_at_once_may_hang_and_seldom_do(recorded: Any) -> None:
    """No rule of one rank alone mends that: neither knows what the other has not launched yet."""
    hanging = pairs = 0
    for schedule in ("1f1b", "2bw"):
        recording = recorded(Case(schedule, 2, 4))
        of_pair, number = hangs_where_two_sync(recording, 0, 1)
        hanging, pairs = hanging + of_pair, pairs + number
    assert 0 < hanging < 0.1 * pairs


@pytest.mark.parametrize("schedule", ["2bw", "paci"])
def test_without_a_rehearsal_pinned_memory_would_hang_the_first_update(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded_now() -> Recording:
        config = small_config(
            schedule, microbatches=4, steps=2, eval_interval=2, optimizer="sgd", **SCHEDULES[schedule]
        )
        return record(config, monkeypatch)

    assert hangs(recorded_now()) == []
    monkeypatch.setattr(RankExecutor, "rehearse", lambda executor, programs: None)
    assert hangs(recorded_now())


@pytest.mark.parametrize(
    ("rule", "variable"),
    [
        ({"one_queue": True}, "CUDA_DEVICE_MAX_CONNECTIONS"),
        ({"blocking": True}, "TORCH_NCCL_BLOCKING_WAIT"),
        ({"in_order": True}, "NCCL_LAUNCH_ORDER_IMPLICIT"),
    ],
)
def test_settings_that_are_refused_hang(
    rule: dict[str, bool], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"stages": 3, "microbatches": 6, "layers": 6, "steps": 2, "eval_interval": 2}
    if "in_order" in rule:
        config = small_config("2bw", **settings, shard_head=True)
    else:
        config = small_config("2bw-v", **settings)
    recording = record(config, monkeypatch)
    assert hangs(recording) == []
    assert hangs(recording, **rule)
    with pytest.raises(DeviceSettingError, match=f"{variable} is 1"):
        check_environment({variable: "1"}, ranks=2)
