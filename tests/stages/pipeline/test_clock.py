"""The clock of a device: what it tells, when, and how many events it needs for it."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from schedules.actions import Action, Op
from schedules.messages import Kind, Message
from stages.liveness.watchdog import Waiting
from stages.pipeline.executor import RankExecutor
from stages.update.clock import AHEAD, Clock, EventClock, HostClock
from stages.update.rank_stats import RankTrace, StageTrace


class Device:
    """Does what it was asked to in order, a piece at a time, when it is told to; the host runs ahead."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[float | DeviceEvent] = []

    def launch(self, seconds: float) -> None:
        self._queue.append(seconds)

    def go_on(self) -> None:
        """Do the next piece of work, and pass the events behind it."""
        self._pass()
        if self._queue:
            seconds = self._queue.pop(0)
            assert isinstance(seconds, float)
            self.now += seconds
        self._pass()

    def _pass(self) -> None:
        while self._queue and isinstance(self._queue[0], DeviceEvent):
            event = self._queue.pop(0)
            assert isinstance(event, DeviceEvent)
            event.at = self.now

    def event(self) -> DeviceEvent:
        self.events += 1
        return DeviceEvent(self)

    def enqueue(self, event: DeviceEvent) -> None:
        self._queue.append(event)

    @property
    def launched(self) -> int:
        """Pieces of work not yet done."""
        return sum(isinstance(piece, float) for piece in self._queue)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at: float | None = None

    def record(self) -> None:
        self.at = None
        self._device.enqueue(self)

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        while self.at is None:
            self._device.go_on()

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        assert self.at is not None
        assert end_event.at is not None
        return 1000 * (end_event.at - self.at)


def run_actions(clock: Clock, device: Device, *, actions: int) -> RankTrace:
    """Forwards that wait 1 s each and compute 2 s, with an update after every fourth."""
    trace = RankTrace(stages={0: StageTrace()}, latest=deque(maxlen=3))
    clock.begin()
    for number in range(actions):
        action = Action(0, Op.FORWARD, number, 0)
        started = clock.mark()
        waiting = clock.mark()
        device.launch(1.0)
        clock.measure(waiting, trace.note_wait)
        device.launch(2.0)
        clock.measure(started, partial(trace.note_action, action))
        if number % 4 == 3:
            clock.tell(trace.note_update)
    clock.finish()
    return trace


def test_a_device_that_lags_behind_is_measured_all_the_same() -> None:
    device = Device()
    trace = run_actions(EventClock(device.event), device, actions=40)
    assert trace.stages[0].actions == {Op.FORWARD: (40, pytest.approx(80.0))}
    assert trace.waited == pytest.approx(40.0)
    assert trace.steady_seconds == pytest.approx(36 * 3.0)
    assert trace.busy == pytest.approx(2 / 3)
    assert [action.microbatch for action, _, _ in trace.latest] == [37, 38, 39]
    lengths = [end - start for _, start, end in trace.latest]
    assert lengths == pytest.approx([2.0] * 3)
    starts = [start for _, start, _ in trace.latest]
    assert [later - start for start, later in pairwise(starts)] == pytest.approx([3.0, 3.0])


def test_events_are_used_again_and_the_host_stays_near() -> None:
    device, ahead = Device(), 0

    class Watched(EventClock):
        def mark(self) -> DeviceEvent:
            nonlocal ahead
            ahead = max(ahead, device.launched)
            event = super().mark()
            assert isinstance(event, DeviceEvent)
            return event

    clock = Watched(device.event)
    run_actions(clock, device, actions=40)
    events = device.events
    assert events <= 2 * AHEAD + 6
    assert AHEAD <= ahead <= AHEAD + 2  # as far ahead as it may be, and no further
    for _ in range(3):  # a segment after another
        run_actions(clock, device, actions=400)
    assert device.events == events


def test_what_is_known_is_told_without_waiting() -> None:
    device, told = Device(), list[float]()

    def tell(began: float, ended: float) -> None:
        told.append(ended - began)

    clock = EventClock(device.event)
    clock.begin()
    start = clock.mark()
    device.launch(5.0)
    clock.measure(start, tell)
    clock.settle()
    assert told == []
    device.go_on()
    clock.settle()
    assert told == [pytest.approx(5.0)]


def test_a_clock_says_what_its_device_waits_for() -> None:
    """Of what the host has launched, the first that the device has not done."""
    device = Device()
    clock = EventClock(device.event)
    clock.begin()
    for waiting in (lambda: "the message of rank 1", None, lambda: "the message of rank 2"):
        start = clock.mark()
        device.launch(1.0)
        clock.measure(start, lambda began, ended: None, waiting=waiting)
    found = []
    for _ in range(4):
        found.append(clock.waiting())
        device.go_on()
    assert found == ["the message of rank 1", None, "the message of rank 2", None]


def test_a_rank_says_which_message_its_device_waits_for() -> None:
    """Its host has long gone on: with NCCL the device waits."""
    device, waiting = Device(), Waiting("waits for F0 of stage 0 from rank 0", 0)
    executor: Any = RankExecutor.__new__(RankExecutor)
    executor._clock, executor.trace = EventClock(device.event), RankTrace()
    executor._links = SimpleNamespace(
        waits=True,
        receive=lambda message: device.launch(1.0),
        waited_for=lambda: waiting,
        waiting=lambda: None,
    )
    executor._clock.begin()
    list(executor._receive(Message(0, 1, Kind.ACTIVATIONS, 0)))
    assert executor.waiting() == waiting
    device.go_on()
    assert executor.waiting() is None


def test_the_hosts_clock_tells_at_once() -> None:
    clock, told = HostClock(), list[float]()
    clock.measure(clock.mark(), lambda began, ended: told.extend((began, ended)))
    clock.tell(told.append)
    assert len(told) == 3
    assert told == sorted(told)
