"""Records the work that the hosts of a run's ranks launch, with the real links, exchanges and executor.

Nothing is exchanged: a recorded communicator records an operation and lets the rank continue, as NCCL does. A
rank's operations and waits do not depend on values, so a tiny model and messages of zeros suffice.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest
import torch
from support.host_events import UPDATES, At, Begin, DeviceWait, Event, HostWait, Recording, Wait
from support.recorded_process import RecordedProcess, RecordedStreams, RecordedUses
from support.small_runs import Rows, ranks_with, replayed
from support.stream_model import unordered
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import stages.pipeline.build
import stages.update.async_update
import stages.update.update_phases
from schedules import Program
from schedules.dependencies import Place
from stages.comm.collectives import Exchange
from stages.comm.topology import Connection, connect
from stages.config.run_config import ModelConfig, RunConfig
from stages.config.segments import schedule_facts, segment_program
from stages.data.batches import Batches
from stages.pipeline.build import Rank, activation_shape
from stages.pipeline.executor import drive
from stages.pipeline.warm_up import warm_up_ranks
from stages.trainer import replay


class _RecordedLinks:
    """Links that record the place of their rank, and which action received which message."""

    def __init__(self, links: Any, recording: Recording, process: int) -> None:
        self._links = links
        self._recording = recording
        self._process = process
        self._at: Place = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)

    def begin(self, program: Program) -> None:
        self._recording.events[self._process].append(Begin())
        self._links.begin(program)

    def passed(self, place: Place) -> None:
        self._at = place
        self._recording.events[self._process].append(At(place))
        self._links.passed(place)

    def receive(self, message: Any) -> Tensor:
        events = self._recording.events[self._process]
        before = len(events)
        received = self._links.receive(message)
        # The first wait is for the message itself; a local message has none.
        first = next((event for event in events[before:] if isinstance(event, Wait)), None)
        if first is not None:
            self._recording.receives[self._process][first.number] = self._at // 2
        return cast(Tensor, received)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def tiny(config: ModelConfig, context: int) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    """A model with negligible cost per stage."""
    blocks: list[nn.Module] = [_Scale() for _ in range(config.layers)]
    return nn.Embedding(config.vocab_size, 2), blocks, nn.Linear(2, config.vocab_size, bias=False)


def tiny_run(config: RunConfig) -> RunConfig:
    """The same run with a model of negligible cost."""
    model = ModelConfig(name="tiny", layers=config.model.layers, width=2, heads=1, kv_heads=1, mlp_width=2)
    if not config.parallel.shard_head:  # its head must be the decoder's
        model.factory = f"{__name__}:tiny"
    data = replace(config.data, context=2)
    return replace(config, model=model, data=data, train=replace(config.train, microbatch_size=1))


def record(config: RunConfig, monkeypatch: pytest.MonkeyPatch, *, uses: bool = False) -> Recording:
    """Events of every process in one segment, including the connections before it.

    No exchange is complete before the host waits for it.

    Args:
        config: configuration of a run of one segment; without `uses`, its model is replaced by a tiny one.
        monkeypatch: installs the recorded parts.
        uses: whether to record which memory the operators use.
    """
    if not uses:
        config = tiny_run(config)
    program = segment_program(config, first_step=0, steps=config.train.steps)
    data_ranks = config.parallel.data
    size = program.num_ranks * data_ranks
    recording = Recording(events=[[] for _ in range(size)], receives=[{} for _ in range(size)])
    connections: list[Connection] = []
    processes: list[RecordedProcess] = []
    streams = [RecordedStreams(events) for events in recording.events]
    for number in range(size):
        process = RecordedProcess(
            rank=number,
            local_rank=number,
            pids=[],
            size=size,
            device=torch.device("cpu"),
            timeout=datetime.timedelta(seconds=1),
            start_timeout=datetime.timedelta(seconds=1),
            address="127.0.0.1",
            # No other process is contacted.
            member=cast(Any, None),
            meetings=cast(Any, None),
            store=HashStore(),
            host_staged=False,
            recording=recording,
            streams=streams[number],
            uses=RecordedUses(recording.events[number], [streams[number]]) if uses else None,
        )
        processes.append(process)
        connection = connect(
            process,
            rank_of_stage=program.rank_of_stage,
            head_shards=program.head_shards,
            tied_shards=program.tied_shards,
            data_ranks=data_ranks,
            shape=activation_shape(config),
            dtype=torch.float32,
            common_step=schedule_facts(config).updates_together,
        )
        links: Any = _RecordedLinks(connection.links, recording, number)
        connections.append(replace(connection, links=links))
    with monkeypatch.context() as patch:
        next_streams = iter(streams)
        patch.setattr(stages.pipeline.build, "streams_of", lambda device: next(next_streams))
        ranks = ranks_with(config, connections)
        for state in (state for rank in ranks for state in rank.stages.values()):
            with state.weights.receiving_initial():
                pass  # the recording has no values
        for process, rank in zip(processes, ranks, strict=True):
            to_host = _copies_of(process.events, process.streams)
            for module in (stages.update.update_phases, stages.update.async_update):
                patch.setattr(module, "to_host", to_host)
            patch.setattr(Batches, "_on_host", _reads_of(process.events))
            with process.uses or nullcontext():
                _perform(rank, program, config)
    return recording


def record_replay(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, *, late: int
) -> tuple[list[Event], str]:
    """Events of a replay's host, with the memory that its operators use, and the digest of its weights.

    Args:
        config: of the run.
        monkeypatch: installs the recorded parts.
        late: how often the host looks at a copy of a verdict before it has arrived.
    """
    events: list[Event] = []
    marks = count()
    streams = [RecordedStreams(events, marks=marks)]

    def streams_of(device: torch.device) -> RecordedStreams:
        streams.append(RecordedStreams(events, marks=marks, updates=f"{UPDATES} {len(streams)}"))
        return streams[-1]

    uses = RecordedUses(events, streams)

    def to_host(numbers: Tensor) -> Exchange[list[float]]:
        mark = uses.current.mark(uses.current.current)
        looks = iter(range(late))

        def ready() -> bool:
            if next(looks, None) is not None:
                return False
            events.append(HostWait(mark))
            return True

        return Exchange(ready=ready, wait=lambda: None, take=numbers.clone().tolist)

    rows = Rows()
    with monkeypatch.context() as patch, uses:
        patch.setattr(stages.pipeline.build, "streams_of", streams_of)
        patch.setattr(stages.update.update_phases, "to_host", to_host)
        replay(config, recorder=rows)
    (end,) = rows.of_kind("end")
    return events, end["weights_sha256"]


def _perform(rank: Rank, program: Program, config: RunConfig) -> None:
    warm_up_ranks([rank], config, device=torch.device("cpu"))
    rank.executor.connect()
    drive([rank.executor.run(program)])
    rank.connection.links.finish()


def _copies_of(events: list[Event], streams: RecordedStreams) -> Callable[[Tensor], Exchange[list[float]]]:
    """Copies to the host, which block the host; the first of a size allocates pinned memory."""
    sizes: set[int] = set()

    def to_host(numbers: Tensor) -> Exchange[list[float]]:
        _allocate_pinned(len(numbers), sizes, events)
        mark = streams.mark(streams.current)
        return Exchange(ready=lambda: False, wait=lambda: events.append(HostWait(mark)), take=numbers.tolist)

    return to_host


def _reads_of(events: list[Event]) -> Callable[..., Tensor]:
    """Batches in host memory; the first of a size allocates pinned memory."""
    sizes: set[int] = set()
    on_host = Batches._on_host

    def reading(batches: Batches, values: Any) -> Tensor:
        held = on_host(batches, values)
        _allocate_pinned(held.numel(), sizes, events)
        return held

    return reading


def _allocate_pinned(entries: int, sizes: set[int], events: list[Event]) -> None:
    """Pinned memory is reused for sizes up to the same power of two; a new size waits for the device."""
    size = (entries - 1).bit_length()
    if size not in sizes:
        sizes.add(size)
        events.append(DeviceWait("pinned memory"))


def check_streams(config: RunConfig, monkeypatch: pytest.MonkeyPatch, *, late: int = 3) -> None:
    """Streams of every rank of a run are ordered, and those of a replay, which has the same bits.

    Args:
        config: of the run.
        monkeypatch: installs the recorded parts.
        late: how often the replay's host looks at a copy before it has arrived.
    """
    for events in record(config, monkeypatch, uses=True).events:
        assert unordered(events) == []
    events, digest = record_replay(config, monkeypatch, late=late)
    assert unordered(events) == []
    assert digest == replayed(config).digest
