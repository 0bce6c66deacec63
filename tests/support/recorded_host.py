"""Records the work that the hosts of a run's ranks launch, with the real links, exchanges and executor.

Nothing is exchanged: a recorded communicator records an operation and lets the rank continue, as NCCL does. A
rank's operations and waits do not depend on values, so a tiny model and messages of zeros suffice.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, cast

import pytest
import torch
from support.small_runs import Rows, ranks_with, replayed
from support.stream_model import (
    ACTIONS,
    UPDATES,
    At,
    Begin,
    DeviceWait,
    Event,
    Freed,
    HostWait,
    Mark,
    Operation,
    Recording,
    Use,
    Wait,
    WaitForMark,
    unordered,
)
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import stages.pipeline.build
import stages.update.async_update
import stages.update.update_phases
from schedules import Program
from schedules.dependencies import Place
from stages.comm.collectives import Exchange
from stages.comm.communicator import Work
from stages.comm.process import Process
from stages.comm.topology import connect
from stages.config.run_config import ModelConfig, RunConfig
from stages.config.segments import as_trained, is_sharded, schedule_facts, segment_program, shards_of
from stages.data.batches import Batches
from stages.pipeline.build import Rank
from stages.pipeline.evaluation import evaluate
from stages.pipeline.executor import drive
from stages.pipeline.warm_up import warm_up_ranks
from stages.resolve.facts import facts
from stages.trainer import replay


class RecordedStreams:
    """The two streams of a rank; operations go to the current one.

    Args:
        events: of the host.
        marks: numbers of its marks.
        updates: name of the updates' stream.
    """

    parallel = True

    def __init__(
        self, events: list[Event], *, marks: Iterator[int] | None = None, updates: str = UPDATES
    ) -> None:
        self._events = events
        self._marks = count() if marks is None else marks
        self._updates = updates
        self.current = ACTIONS

    def fork(self) -> None:
        self._events.append(WaitForMark(self.mark(ACTIONS), self._updates))

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, self.current = self.current, self._updates
        yield
        self.current = before

    def point(self) -> int:
        return self.mark(self._updates)

    def join(self, point: int) -> None:
        self._events.append(WaitForMark(point, ACTIONS))

    def mark(self, stream: str) -> int:
        """Add a mark to a stream."""
        number = next(self._marks)
        self._events.append(Mark(number, stream))
        return number


class RecordedUses(TorchDispatchMode):
    """Within this context, records which memory every operator reads and writes, on which stream.

    Args:
        events: of the host.
        streams: those of the device; whatever runs on none of them runs on the actions' stream.
    """

    def __init__(self, events: list[Event], streams: Sequence[RecordedStreams]) -> None:
        super().__init__()
        self._events = events
        self.streams = streams
        self._blocks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = count()

    @property
    def current(self) -> RecordedStreams:
        """The streams of the rank whose turn it is."""
        return next((streams for streams in self.streams if streams.current != ACTIONS), self.streams[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        is_view = any(given.alias_info and not given.alias_info.is_write for given in schema.returns)
        name = schema.name.removeprefix("aten::")
        if name.startswith(("empty", "new_empty")):
            self._block(result, self.current.current)
        elif not is_view:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            stream = self.current.current
            written = {id(tensor) for tensor in _tensors(result)}
            for argument in schema.arguments:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _tensors(given.get(argument.name)):
                    self.use(tensor, stream, writes=writes, by=name)
                    written.discard(id(tensor))
            for tensor in _tensors(result):
                if id(tensor) in written:
                    self._block(tensor, stream)
                    self.use(tensor, stream, writes=True, by=name)
        if name == "_local_scalar_dense":
            self._events.append(HostWait(self.current.mark(self.current.current)))
        return result

    def use(self, tensor: Tensor, stream: str, *, writes: bool, by: str) -> None:
        """Record one use of a tensor's memory."""
        if tensor.numel():
            start = tensor.storage_offset() * tensor.element_size()
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            end = start + (last + 1) * tensor.element_size()
            self._events.append(Use(stream, self._block(tensor, ACTIONS), start, end, writes, by))

    def _block(self, tensor: Tensor, allocated_on: str) -> int:
        """The number of a tensor's block; what is new here was allocated on that stream."""
        storage = tensor.untyped_storage()
        if storage not in self._blocks:
            self._blocks[storage] = number = next(self._numbers)
            weakref.finalize(storage, self._events.append, Freed(number, allocated_on)).atexit = False
        return self._blocks[storage]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _RecordedWork:
    """An operation in progress; like NCCL's, it holds its tensors until it is waited for."""

    def __init__(self, number: int, process: RecordedProcess, held: Sequence[Tensor]) -> None:
        self._number = number
        self._process = process
        self._held = held

    def is_completed(self) -> bool:
        return False

    def wait(self) -> object:
        self._process.events.append(Wait(self._number, self._process.streams.current))
        self._held = ()
        return None


class _RecordedWorks:
    """Operations that were begun in one launch."""

    def __init__(self, works: Sequence[_RecordedWork]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return False

    def wait(self) -> object:
        for work in self._works:
            work.wait()
        return None


class _RecordedCommunicator:
    """A communicator that exchanges nothing; received tensors are zero."""

    def __init__(self, process: RecordedProcess, name: str, ranks: Sequence[int]) -> None:
        self._process = process
        self._name = name
        self._ranks = ranks
        self._coalesced: list[tuple[Tensor, bool]] | None = None
        """Broadcast runs, and whether this rank owns them, since `_start_coalescing`."""
        self._messages: list[_RecordedWork] = []
        """Likewise: messages, which the model has follow each other; NCCL has them progress beside each
        other."""

    def _begin(
        self,
        kind: str,
        given: Sequence[Tensor],
        into: Sequence[Tensor] = (),
        peer: int | None = None,
        parts: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> _RecordedWork:
        process = self._process
        number = next(process.numbers)
        peer_rank = None if peer is None else self._ranks[peer]
        of_all = [*given, *into] if kind == "broadcasts" else given or into
        size = sum(tensor.numel() for tensor in of_all)
        stream = process.streams.current
        process.events.append(Operation(number, self._name, kind, peer_rank, size, stream, parts))
        with _disable_current_modes():
            for tensor in () if kind == "broadcasts" else into:
                tensor.data.zero_()
        if process.uses is not None:
            for tensors, writes in ((given, False), (into, True)):
                for tensor in tensors:
                    process.uses.use(tensor, self._name, writes=writes, by=kind)
        return _RecordedWork(number, process, [*given, *into])

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Any:
        return self._message(self._begin("send", tensors, peer=to))

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Any:
        return self._message(self._begin("recv", (), tensors, peer=source))

    def _message(self, work: _RecordedWork) -> _RecordedWork | None:
        if self._coalesced is None:
            return work
        self._messages.append(work)
        return None

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work:
        return self._begin("allgather", inputs, outputs[0])

    def _allgather_base(self, output: Tensor, given: Tensor, /) -> Work:
        return self._begin("allgather", [given], [output])

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        assert self._coalesced is not None, "one operation for each run"
        self._coalesced.append((tensor, self._ranks[root] == self._process.rank))
        return _RecordedWork(-1, self._process, ())

    def _start_coalescing(self) -> None:
        assert self._coalesced is None
        self._coalesced = []

    def _end_coalescing(self) -> Work:
        runs, self._coalesced = self._coalesced, None
        messages, self._messages = self._messages, []
        if messages:
            return _RecordedWorks(messages)
        assert runs
        return self._begin(
            "broadcasts", [run for run, own in runs if own], [run for run, own in runs if not own]
        )

    def alltoall_base(
        self, output: Tensor, input_: Tensor, output_sizes: list[int], input_sizes: list[int], /
    ) -> Work:
        parts = (tuple(input_sizes), tuple(output_sizes))
        return self._begin("alltoall", [input_], [output], parts=parts)


@dataclass(frozen=True, kw_only=True)
class RecordedProcess(Process):
    """One of the run's processes, all of which are this process."""

    recording: Recording
    streams: RecordedStreams
    numbers: Iterator[int] = field(default_factory=count)
    uses: RecordedUses | None = None
    """Records the memory that operations use."""

    @property
    def device_waits(self) -> bool:
        return True

    @property
    def events(self) -> list[Event]:
        return self.recording.events[self.rank]

    def _communicator(self, name: str, ranks: Sequence[int], *, link: bool) -> Any:
        self.recording.members.setdefault(name, tuple(ranks))
        return _RecordedCommunicator(self, name, ranks)


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
    model = ModelConfig(
        name="tiny",
        layers=config.model.layers,
        width=2,
        heads=1,
        kv_heads=1,
        mlp_width=2,
        # A model of a factory has none.
        tied=config.model.tied and config.parallel.shard_head,
    )
    # The head in shards must be the decoder's; a decoder's matrices have owners under `fully_shard`.
    if not config.parallel.shard_head and not is_sharded(config):
        model = replace(model, factory=f"{__name__}:tiny")
    data = replace(config.data, context=2)
    return replace(config, model=model, data=data, train=replace(config.train, microbatch_size=1))


def record(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, *, uses: bool = False, evaluates: bool = False
) -> Recording:
    """Events of every process in one segment, including the connections before it.

    No exchange is complete before the host waits for it.

    Args:
        config: configuration of a run of one segment; without `uses`, its model is replaced by a tiny one.
        monkeypatch: installs the recorded parts.
        uses: whether to record which memory the operators use.
        evaluates: whether an evaluation follows.
    """
    if not uses:
        config = tiny_run(config)
    config = as_trained(config)
    program = segment_program(config, first_step=0, steps=config.train.steps)
    size = program.num_ranks * config.parallel.data
    recording = Recording(events=[[] for _ in range(size)], receives=[{} for _ in range(size)])
    with monkeypatch.context() as patch:
        # One process after the other: torch has one default group, which `fully_shard` asks for.
        for number in range(size):
            streams = RecordedStreams(recording.events[number])
            patch.setattr(stages.pipeline.build, "streams_of", lambda device, streams=streams: streams)
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
                streams=streams,
                uses=RecordedUses(recording.events[number], [streams]) if uses else None,
            )
            connection = connect(
                process,
                program,
                shape=facts(config).activation_shape,
                dtype=torch.float32,
                common_step=schedule_facts(config).updates_together,
                shards=shards_of(config) if is_sharded(config) else None,
            )
            links: Any = _RecordedLinks(connection.links, recording, number)
            [rank] = ranks_with(config, [replace(connection, links=links)])
            for state in rank.stages.values():
                with state.weights.receiving_initial():
                    pass  # the recording has no values
            to_host = _copies_of(process.events, process.streams)
            for module in (stages.update.update_phases, stages.update.async_update):
                patch.setattr(module, "to_host", to_host)
            patch.setattr(Batches, "_on_host", _reads_of(process.events))
            with process.uses or nullcontext():
                _perform(rank, program, config)
                if evaluates:
                    _evaluate(rank, program, version=config.train.steps)
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
    warm_up_ranks([rank], facts(config), device=torch.device("cpu"))
    rank.executor.connect()
    drive([rank.executor.run(program)])
    rank.connection.links.finish()


def _evaluate(rank: Rank, program: Program, *, version: int) -> None:
    evaluation = evaluate(
        rank.stages,
        program,
        connection=rank.connection,
        batches=rank.batches,
        version=version,
        dtype=torch.float32,
        on_action=lambda: None,
    )
    drive([evaluation])
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
