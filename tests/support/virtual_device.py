"""Devices in virtual time: streams, events and communicators, and hosts that launch and query work.

Each rank's host is a thread of its own, and one of them runs at a time: the one whose clock is behind all
others'. So the answer to a host's query is known when it asks. The work of a device is a graph: every item
ends some seconds after its predecessors, and an exchange starts when all members have launched it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LAUNCH = 0.01
"""Seconds that a host needs to launch one item of work."""


class Work:
    """An item of device work; its end is known once the ends of its predecessors are."""

    def __init__(self, seconds: float = 0.0, *, members: int = 1) -> None:
        self.seconds = seconds
        self.after: list[Work] = []
        self.launched_at = 0.0
        self._missing = members
        self._end: float | None = None

    def launch(self, at: float, after: list[Work]) -> None:
        """Launch at one member."""
        self.after += after
        self.launched_at = max(self.launched_at, at)
        self._missing -= 1

    @property
    def end(self) -> float | None:
        if self._end is None and self._missing == 0:
            ends = [work.end for work in self.after]
            if None not in ends:
                self._end = max([self.launched_at, *(end for end in ends if end is not None)]) + self.seconds
                self.after = []
        return self._end


class World:
    """All hosts and their shared state."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._hosts: list[Device] = []
        self._failures: list[BaseException] = []
        self.running: Device | None = None
        """Device whose host is running."""
        self.messages: dict[Any, Work] = defaultdict(Work)
        self.exchanges: dict[tuple[str, int], Work] = {}

    def run(self, parts: list[tuple[Device, Callable[[], None]]]) -> None:
        """Run the function of every host.

        Raises:
            RuntimeError: all remaining hosts wait for each other.
        """
        self._hosts = [device for device, _ in parts]
        threads = [threading.Thread(target=self._part, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        if self._failures:
            raise self._failures[0]

    def _part(self, device: Device, part: Callable[[], None]) -> None:
        try:
            self.pause(device)
            part()
        except BaseException as error:
            self._failures.append(error)
        with self._turn:
            device.over = True
            self._turn.notify_all()

    def pause(self, device: Device) -> None:
        """Let the hosts that are behind run, and wait for the awaited work of this one."""
        with self._turn:
            device.paused = True
            self._turn.notify_all()
            while not self._may_go_on(device):
                self._turn.wait(timeout=60)
            device.paused = False
            self.running = device
            if device.awaits is not None:
                assert device.awaits.end is not None
                device.now = max(device.now, device.awaits.end)
                device.awaits = None

    def _may_go_on(self, device: Device) -> bool:
        left = [host for host in self._hosts if not host.over]
        if self._failures:
            raise RuntimeError("another host has failed")
        if not all(host.paused for host in left):
            return False
        able = [host for host in left if host.awaits is None or host.awaits.end is not None]
        if not able:
            raise RuntimeError("all hosts wait for what none has launched")
        return device is min(able, key=lambda host: (host.next_at, host.number))


class Device:
    """One rank's device and host."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.now = 0.0
        """Clock of the host, seconds."""
        self.paused = self.over = False
        self.awaits: Work | None = None
        self.tails: dict[str, Work] = {}
        self.looks = 0
        """Number of times that the host queried an exchange."""
        self.largest_part = 1
        """Largest number of gradient elements that one data rank owns."""
        self.stream = "actions"
        self.action = ""
        """Name of the host's current action."""
        self.done: dict[str, list[Work]] = defaultdict(list)
        """Work launched for each action and update."""

    @property
    def next_at(self) -> float:
        end = None if self.awaits is None else self.awaits.end
        return self.now if end is None else max(self.now, end)

    def launch(self, seconds: float, *, name: str = "") -> Work:
        """Add work to the current stream."""
        self.now += LAUNCH
        work = Work(seconds)
        before = self.tails.get(self.stream)
        work.launch(self.now, [] if before is None else [before])
        self.tails[self.stream] = work
        if name:
            self.done[name].append(work)
        return work

    def wait_for(self, work: Work) -> None:
        """Make the current stream wait for `work`."""
        before = self.tails.get(self.stream)
        barrier = Work()
        barrier.launch(0.0, [work] if before is None else [before, work])
        self.tails[self.stream] = barrier

    def query(self, work: Work) -> bool:
        self.world.pause(self)
        return work.end is not None and work.end <= self.now

    def synchronize(self, work: Work) -> None:
        self.awaits = work
        self.world.pause(self)

    def tail(self) -> Work:
        return self.tails.setdefault(self.stream, _nothing())


def _nothing() -> Work:
    work = Work()
    work.launch(0.0, [])
    return work


class VirtualEvent:
    """Replaces `torch.cuda.Event`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.work = _nothing()

    def record(self) -> None:
        self.work = self._device.launch(0.0)

    def query(self) -> bool:
        return self._device.query(self.work)

    def synchronize(self) -> None:
        self._device.synchronize(self.work)

    def elapsed_time(self, end_event: VirtualEvent) -> float:
        assert self.work.end is not None
        assert end_event.work.end is not None
        return 1000 * (end_event.work.end - self.work.end)


class VirtualStreams:
    """Replaces `CudaStreams`."""

    parallel = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def fork(self) -> None:
        actions = self._device.tail()
        with self.beside():
            self._device.wait_for(actions)

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, self._device.stream = self._device.stream, "updates"
        yield
        self._device.stream = before

    def point(self) -> Work:
        with self.beside():
            return self._device.tail()

    def join(self, point: Work) -> None:
        self._device.wait_for(point)


class VirtualCommunicator:
    """A communicator like NCCL's: one queue, and waiting blocks the stream, not the host."""

    def __init__(self, device: Device, name: str, *, size: int, seconds: Callable[[str, int], float]) -> None:
        self._device = device
        self._name = name
        self._size = size
        self._seconds = seconds
        self._count = 0
        self._coalesced: list[int] | None = None

    def _begin(self, kind: str, entries: int) -> VirtualWork:
        key = self._name, self._count
        self._count += 1
        exchanges = self._device.world.exchanges
        if key not in exchanges:
            exchanges[key] = Work(self._seconds(kind, entries), members=self._size)
        work, queued = exchanges[key], self._device.tail()
        before = self._device.tails.get(self._name)
        work.launch(self._device.now, [queued] if before is None else [queued, before])
        self._device.tails[self._name] = work
        return VirtualWork(self._device, work)

    def allgather(self, outputs: Any, inputs: Any, /) -> VirtualWork:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._begin("allgather", inputs[0].numel())

    def broadcast(self, tensor: Any, root: int, /) -> VirtualWork | None:
        if self._coalesced is None:
            return self._begin("broadcast", tensor.numel())
        self._coalesced.append(tensor.numel())
        return None

    def _start_coalescing(self) -> None:
        self._coalesced = []

    def _end_coalescing(self) -> VirtualWork:
        runs, self._coalesced = self._coalesced, None
        return self._begin("broadcasts", sum(runs or ()))

    def alltoall_base(self, output: Any, input_: Any, output_sizes: Any, input_sizes: Any, /) -> VirtualWork:
        output.zero_()
        return self._begin("alltoall", max(input_sizes))


class VirtualWork:
    def __init__(self, device: Device, work: Work) -> None:
        self._device = device
        self._work = work

    def is_completed(self) -> bool:
        self._device.looks += 1
        return self._device.query(self._work)

    def wait(self) -> None:
        self._device.wait_for(self._work)
