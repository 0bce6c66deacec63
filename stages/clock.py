"""What a rank reads its times from: the host's clock, or on a GPU events in the device's queue of work.

To the host of a GPU an action is launched, not done, and `work.wait()` of NCCL makes the device wait and not
the host. So there a time is what lies between two events that the device passes: between the one before a
receive and the one after it, it has waited for others. Neither clock is asked for a time at once; it calls
back when it knows, in the order in which it was asked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

AHEAD = 8
"""Times that a device's clock may still have to tell before the host waits: three or four actions."""


class Clock(Protocol):
    """Tells the times of one rank."""

    def begin(self) -> None:
        """A segment begins; the device has nothing left to do."""

    def beside(self) -> Clock:
        """A clock for work that is queued beside: to ask one of the two never waits for the other's work."""

    def mark(self) -> Any:
        """This point in the rank's work, for one `measure`."""

    def measure(self, start: Any, then: Callable[[float, float], None]) -> None:
        """Have `then` called with the times of the mark `start` and of this point, in seconds of
        `time.perf_counter`."""

    def tell(self, then: Callable[[float], None]) -> None:
        """Have `then` called with the time of this point, in seconds of `time.perf_counter`."""

    def settle(self) -> None:
        """Call back with all times that are known by now."""

    def finish(self) -> None:
        """Wait until the device has come to this point, and call back with all that is left."""


class HostClock:
    """Where the host computes: knows every time at once."""

    def begin(self) -> None:
        pass

    def beside(self) -> HostClock:
        return self

    def mark(self) -> float:
        return time.perf_counter()

    def measure(self, start: float, then: Callable[[float, float], None]) -> None:
        then(start, time.perf_counter())

    def tell(self, then: Callable[[float], None]) -> None:
        then(time.perf_counter())

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        pass


class Event(Protocol):
    """What `torch.cuda.Event` offers of use here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class EventClock:
    """Where a device computes what the host launches. Events are used again once they have been read.

    It also sees that the host runs ahead of the device by a few actions at most. So the device always has
    work queued when the host waits here, an update that becomes possible between two actions is queued soon
    and not behind all that the host could launch, and there is an end to the events.

    Args:
        new_event: makes an event that has a time.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._free: list[Event] = []
        self._asked: deque[tuple[Event | None, Event, Callable[..., None]]] = deque()
        self._told: tuple[Event, float] | None = None
        """An event and its time; elapsed times are short ones, which keeps them exact."""

    def begin(self) -> None:
        if self._told is not None:
            self._free.append(self._told[0])
        event = self.mark()
        event.synchronize()
        self._told = (event, time.perf_counter())

    def beside(self) -> EventClock:
        return EventClock(self._new_event)

    def mark(self) -> Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def measure(self, start: Event, then: Callable[[float, float], None]) -> None:
        self._ask(start, then)

    def tell(self, then: Callable[[float], None]) -> None:
        self._ask(None, then)

    def _ask(self, start: Event | None, then: Callable[..., None]) -> None:
        self._asked.append((start, self.mark(), then))
        self.settle()
        while len(self._asked) > AHEAD:
            self._asked[0][1].synchronize()
            self.settle()

    def settle(self) -> None:
        while self._asked and self._asked[0][1].query():
            start, end, then = self._asked.popleft()
            assert self._told is not None
            before, at = self._told
            if start is not None:
                began = at + _seconds(before, start)
                ended = began + _seconds(start, end)
                self._free += [start, end]
                then(began, ended)
            else:
                told = at + _seconds(before, end)
                self._free.append(before)
                self._told = (end, told)
                then(told)

    def finish(self) -> None:
        event = self.mark()
        event.synchronize()
        self._free.append(event)
        self.settle()


def _seconds(start: Event, end: Event) -> float:
    return start.elapsed_time(end) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock of what is computed on `device`."""
    if device.type == "cpu":
        return HostClock()

    def new_event() -> Event:
        event: Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        return event

    return EventClock(new_event)
