"""Processes, communicators and streams that record operations and exchange nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from support.host_events import (
    ACTIONS,
    UPDATES,
    Event,
    Freed,
    HostWait,
    Mark,
    Operation,
    Recording,
    Use,
    Wait,
    WaitForMark,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from stages.comm.communicator import Work
from stages.comm.process import Process


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


class _RecordedCommunicator:
    """A communicator that exchanges nothing; received tensors are zero."""

    def __init__(self, process: RecordedProcess, name: str, ranks: Sequence[int]) -> None:
        self._process = process
        self._name = name
        self._ranks = ranks
        self._coalesced: list[tuple[Tensor, bool]] | None = None
        """Broadcast runs, and whether this rank owns them, since `_start_coalescing`."""

    def _begin(
        self, kind: str, given: Sequence[Tensor], into: Sequence[Tensor] = (), peer: int | None = None
    ) -> Work:
        process = self._process
        number = next(process.numbers)
        peer_rank = None if peer is None else self._ranks[peer]
        of_all = [*given, *into] if kind == "broadcasts" else given or into
        size = sum(tensor.numel() for tensor in of_all)
        stream = process.streams.current
        process.events.append(Operation(number, self._name, kind, peer_rank, size, stream))
        with _disable_current_modes():
            for tensor in () if kind == "broadcasts" else into:
                tensor.data.zero_()
        if process.uses is not None:
            for tensors, writes in ((given, False), (into, True)):
                for tensor in tensors:
                    process.uses.use(tensor, self._name, writes=writes, by=kind)
        return _RecordedWork(number, process, [*given, *into])

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        return self._begin("send", tensors, peer=to)

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        return self._begin("recv", (), tensors, peer=source)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work:
        return self._begin("allgather", inputs, outputs[0])

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        assert self._coalesced is not None, "one operation for each run"
        self._coalesced.append((tensor, self._ranks[root] == self._process.rank))
        return _RecordedWork(-1, self._process, ())

    def _start_coalescing(self) -> None:
        assert self._coalesced is None
        self._coalesced = []

    def _end_coalescing(self) -> Work:
        runs, self._coalesced = self._coalesced, None
        assert runs
        return self._begin(
            "broadcasts", [run for run, own in runs if own], [run for run, own in runs if not own]
        )

    def alltoall_base(
        self, output: Tensor, input_: Tensor, output_sizes: list[int], input_sizes: list[int], /
    ) -> Work:
        return self._begin("alltoall", [input_], [output])


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
