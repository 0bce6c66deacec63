"""Clocks of a rank: the host's, or on a GPU events in the device's queue of work.

The host of a GPU launches actions without waiting for them, and `work.wait()` of NCCL blocks the device, not
the host. So times there are measured between two events in the device's queue: between the one before a
receive and the one after it, the device has waited for others. Times are not returned at once: the clock
calls back when it knows them, in the order of the requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")

AHEAD = 8
"""Times still unknown to a device's clock before the host waits: three or four actions."""


class Clock(Protocol):
    """Measures the times of one rank."""

    def begin(self) -> None:
        """Start a segment; the device is idle."""

    def beside(self) -> Clock:
        """A clock for a parallel queue of work; neither of the two waits for the other's work."""

    def mark(self) -> Any:
        """Mark this point in the rank's work, for one `measure`."""

    def measure(
        self, start: Any, then: Callable[[float, float], None], *, waiting: Callable[[], T] | None = None
    ) -> None:
        """Call `then` with the times of the mark `start` and of this point, in seconds of
        `time.perf_counter`, once they are known.

        Args:
            start: a mark.
            then: called with the times.
            waiting: describes what the device waits for in between, if it may have to.
        """

    def waiting(self) -> Any:
        """What `waiting` of the oldest time that is not known yet gives; called from another thread."""

    def tell(self, then: Callable[[float], None]) -> None:
        """Call `then` with the time of this point, in seconds of `time.perf_counter`, once it is known."""

    def settle(self) -> None:
        """Make the callbacks whose times are known by now."""

    def finish(self) -> None:
        """Wait until the device reaches this point, and make all remaining callbacks."""


class HostClock:
    """Clock of a host that computes by itself: every time is known at once."""

    def begin(self) -> None:
        pass

    def beside(self) -> HostClock:
        return self

    def mark(self) -> float:
        return time.perf_counter()

    def measure(
        self, start: float, then: Callable[[float, float], None], *, waiting: Callable[[], T] | None = None
    ) -> None:
        then(start, time.perf_counter())

    def waiting(self) -> None:
        pass

    def tell(self, then: Callable[[float], None]) -> None:
        then(time.perf_counter())

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        pass


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class _Request(NamedTuple):
    """A time that is not known yet."""

    start: Event | None
    end: Event
    then: Callable[..., None]
    waiting: Callable[[], Any] | None


class EventClock:
    """Clock of a device that runs what the host launches. Events are reused once they have been read.

    It also keeps the host at most a few actions ahead of the device. So the device always has work queued
    when the host waits here, an update that becomes possible between two actions is queued soon, and the
    number of events is bounded.

    Args:
        new_event: creates a timed event.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._free: list[Event] = []
        self._requests: deque[_Request] = deque()
        self._reference: tuple[Event, float] | None = None
        """A recent event and its time; elapsed times from it are short, which keeps them exact."""

    def begin(self) -> None:
        if self._reference is not None:
            self._free.append(self._reference[0])
        event = self.mark()
        event.synchronize()
        self._reference = (event, time.perf_counter())

    def beside(self) -> EventClock:
        return EventClock(self._new_event)

    def mark(self) -> Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def measure(
        self, start: Event, then: Callable[[float, float], None], *, waiting: Callable[[], T] | None = None
    ) -> None:
        self._request(start, then, waiting)

    def tell(self, then: Callable[[float], None]) -> None:
        self._request(None, then, None)

    def _request(
        self, start: Event | None, then: Callable[..., None], waiting: Callable[[], Any] | None
    ) -> None:
        self._requests.append(_Request(start, self.mark(), then, waiting))
        self.settle()
        while len(self._requests) > AHEAD:
            self._requests[0].end.synchronize()
            self.settle()

    def waiting(self) -> Any:
        for request in tuple(self._requests):
            if not request.end.query():
                return None if request.waiting is None else request.waiting()
        return None

    def settle(self) -> None:
        while self._requests and self._requests[0].end.query():
            start, end, then, _ = self._requests.popleft()
            assert self._reference is not None
            before, at = self._reference
            if start is not None:
                began = at + _seconds(before, start)
                ended = began + _seconds(start, end)
                self._free += [start, end]
                then(began, ended)
            else:
                told_at = at + _seconds(before, end)
                self._free.append(before)
                self._reference = (end, told_at)
                then(told_at)

    def finish(self) -> None:
        event = self.mark()
        event.synchronize()
        self._free.append(event)
        self.settle()


def _seconds(start: Event, end: Event) -> float:
    return start.elapsed_time(end) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock for computation on `device`."""
    if device.type == "cpu":
        return HostClock()

    def new_event() -> Event:
        event: Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        return event

    return EventClock(new_event)
