"""Processes, communicators and streams that record operations and exchange nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from support.host_events import (
    ACTIONS,
    UPDATES,
    Event,
    Mark,
    Operation,
    Recording,
    Wait,
    WaitForMark,
)
from torch import Tensor

from stages.comm.communicator import Work
from stages.comm.process import Process


class RecordedStreams:
    """The two streams of a rank; operations go to the current one."""

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
        """Add a mark to a stream."""
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
    """A communicator that exchanges nothing; received tensors are zero."""

    def __init__(self, process: RecordedProcess, name: str, ranks: Sequence[int]) -> None:
        self._process = process
        self._name = name
        self._ranks = ranks

    def _begin(self, kind: str, tensors: Sequence[Tensor], peer: int | None = None) -> Work:
        process = self._process
        number = next(process.numbers)
        peer_rank = None if peer is None else self._ranks[peer]
        size = sum(tensor.numel() for tensor in tensors)
        stream = process.streams.current
        process.events.append(Operation(number, self._name, kind, peer_rank, size, stream))
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
        self, output: Tensor, input_: Tensor, output_sizes: list[int], input_sizes: list[int], /
    ) -> Work:
        output.zero_()
        return self._begin("alltoall", [input_])


@dataclass(frozen=True, kw_only=True)
class RecordedProcess(Process):
    """One of the run's processes, all of which are this process."""

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
