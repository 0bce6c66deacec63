"""What the hosts of a run's ranks give their devices, recorded from the real transport, exchanges and
executor.

Nothing is exchanged: a recorded communicator notes an operation and lets the rank go on, as NCCL does. A
rank's operations and waits do not depend on the numbers, so a tiny model and messages of zeros serve.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import stages.assemble
import stages.ending
import stages.verdict
from schedules import Program
from schedules.dependencies import Place
from stages.assemble import Rank, build_ranks, has_common_step
from stages.communicator import Work
from stages.config import ModelConfig, RunConfig
from stages.connection import Connection, connect
from stages.corpus import prepare
from stages.groups import Exchange
from stages.process import Process
from stages.programs import segment_program
from stages.turns import drive


class Operation(NamedTuple):
    """The host has the device exchange something on a communicator."""

    number: int
    """Of this rank's operations."""
    communicator: str
    kind: str
    peer: int | None
    """Process at the other end; None where all members take part."""
    size: int
    """Elements."""
    stream: str
    """That it waits for, as far as that has been filled by then."""


class Wait(NamedTuple):
    """The host has a stream wait for an operation."""

    number: int
    stream: str


class Mark(NamedTuple):
    """A point in a stream."""

    number: int
    """Of this rank's marks."""
    stream: str


class WaitForMark(NamedTuple):
    """The host has a stream wait for a mark."""

    number: int
    stream: str


class HostWait(NamedTuple):
    """The host itself waits for a mark."""

    number: int


class At(NamedTuple):
    """The rank has come to this place of its actions."""

    place: Place


class Begin(NamedTuple):
    """A segment begins."""


Event = Operation | Wait | Mark | WaitForMark | HostWait | At | Begin

ACTIONS, UPDATES = "actions", "updates"
"""The streams of a rank."""


@dataclass
class Recording:
    """Of all processes of a run."""

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each communicator."""
    events: list[list[Event]] = field(default_factory=list)
    """By process."""
    receives: list[dict[int, int]] = field(default_factory=list)
    """By process: for each receive that an action waited for, the number of that action."""


class RecordedStreams:
    """The two streams of a rank; what its host does is put into the one that is current."""

    parallel = True

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._marks = count()
        self.current = ACTIONS

    def fork(self) -> None:
        self._events.append(WaitForMark(self.mark(ACTIONS), UPDATES))

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, self.current = self.current, UPDATES
        yield
        self.current = before

    def point(self) -> int:
        return self.mark(UPDATES)

    def join(self, point: int) -> None:
        self._events.append(WaitForMark(point, ACTIONS))

    def mark(self, stream: str) -> int:
        """Put a mark into a stream."""
        number = next(self._marks)
        self._events.append(Mark(number, stream))
        return number


class _RecordedWork:
    def __init__(self, number: int, process: RecordedProcess) -> None:
        self._number = number
        self._process = process

    def is_completed(self) -> bool:
        return False

    def wait(self) -> object:
        self._process.events.append(Wait(self._number, self._process.streams.current))
        return None


class _RecordedCommunicator:
    """A communicator that exchanges nothing; what is received is zero."""

    def __init__(self, process: RecordedProcess, name: str, ranks: Sequence[int]) -> None:
        self._process = process
        self._name = name
        self._ranks = ranks

    def _begin(self, kind: str, tensors: Sequence[Tensor], peer: int | None = None) -> Work:
        process = self._process
        number = next(process.numbers)
        of = None if peer is None else self._ranks[peer]
        size = sum(tensor.numel() for tensor in tensors)
        stream = process.streams.current
        process.events.append(Operation(number, self._name, kind, of, size, stream))
        return _RecordedWork(number, process)

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        return self._begin("send", tensors, to)

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        for tensor in tensors:
            tensor.data.zero_()
        return self._begin("recv", tensors, source)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work:
        for output in outputs[0]:
            output.zero_()
        return self._begin("allgather", inputs)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        return self._begin(f"broadcast from {root}", [tensor])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work:
        output.zero_()
        return self._begin("alltoall", [given])


@dataclass(frozen=True, kw_only=True)
class RecordedProcess(Process):
    """One of the processes, all of which are this one."""

    recording: Recording
    streams: RecordedStreams
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def device_waits(self) -> bool:
        return True

    @property
    def events(self) -> list[Event]:
        return self.recording.events[self.rank]

    def _communicator(self, name: str, ranks: Sequence[int], *, link: bool) -> Any:
        self.recording.members.setdefault(name, tuple(ranks))
        return _RecordedCommunicator(self, name, ranks)


class _Followed:
    """Links that note where their rank is, and which action has received what."""

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
        # The first wait within it is for the message itself; a local one has none.
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
    """A model whose stages cost next to nothing."""
    blocks: list[nn.Module] = [_Scale() for _ in range(config.layers)]
    return nn.Embedding(config.vocab_size, 2), blocks, nn.Linear(2, config.vocab_size, bias=False)


def record(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """The events of every process of one segment, the connections before it among them.

    No exchange is complete before the host waits for it.

    Args:
        config: the run's, of one segment; its model is replaced by a tiny one.
        monkeypatch: that the recorded parts are put in place by.
    """
    config.model = ModelConfig(
        name="tiny", layers=config.model.layers, width=2, heads=1, kv_heads=1, mlp_width=2
    )
    config.model.factory = f"{__name__}:tiny"
    config.data.context, config.train.microbatch_size = 2, 1
    program = segment_program(config, first_step=0, steps=config.train.steps)
    data_ranks = config.parallel.data
    size = program.num_ranks * data_ranks
    recording = Recording(events=[[] for _ in range(size)], receives=[{} for _ in range(size)])
    connections: list[Connection] = []
    streams = [RecordedStreams(events) for events in recording.events]
    for number in range(size):
        process = RecordedProcess(
            rank=number,
            size=size,
            device=torch.device("cpu"),
            timeout=datetime.timedelta(seconds=1),
            start_timeout=datetime.timedelta(seconds=1),
            address="127.0.0.1",
            # Nobody is met here.
            member=cast(Any, None),
            meetings=cast(Any, None),
            store=HashStore(),
            through_host=False,
            recording=recording,
            streams=streams[number],
        )
        connection = connect(
            process,
            rank_of_stage=program.rank_of_stage,
            data_ranks=data_ranks,
            shape=(1, 2, 2),
            dtype=torch.float32,
            common_step=has_common_step(config),
        )
        followed: Any = _Followed(connection.links, recording, number)
        connections.append(replace(connection, links=followed))
    with monkeypatch.context() as patch:
        of_ranks = iter(streams)
        patch.setattr(stages.assemble, "streams_of", lambda device: next(of_ranks))
        ranks = build_ranks(
            config,
            connections=connections,
            corpus=prepare(config.data),
            device=torch.device("cpu"),
            on_step=lambda result: None,
            stop=lambda: False,
        )
        for events, of_rank, rank in zip(recording.events, streams, ranks, strict=True):
            for module in (stages.verdict, stages.ending):
                patch.setattr(module, "to_host", _copies_of(events, of_rank))
            _perform(rank, program)
    return recording


def _perform(rank: Rank, program: Program) -> None:
    rank.executor.connect()
    drive([rank.executor.run(program)])
    rank.connection.links.finish()


def _copies_of(events: list[Event], streams: RecordedStreams) -> Callable[[Tensor], Exchange[list[float]]]:
    """Copies to the host, for which the host of a GPU waits."""

    def to_host(numbers: Tensor) -> Exchange[list[float]]:
        mark = streams.mark(streams.current)
        return Exchange(ready=lambda: False, wait=lambda: events.append(HostWait(mark)), take=numbers.tolist)

    return to_host
