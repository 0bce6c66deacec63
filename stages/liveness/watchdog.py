"""Detects that a process makes no progress, and prints the stacks of its threads."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from stages.config import SiteConfig
from stages.liveness.stall import Phase, stall_limits


class Activity(NamedTuple):
    """The latest progress of a process."""

    doing: str
    """The phase it is in, as a verb in -ing."""
    at: float
    """Time of the latest progress (`time.perf_counter`), seconds."""
    limit: float
    """Seconds without progress after which it counts as stalled."""


class ActivityTracker:
    """The progress of a process: its phase, and when it last did something."""

    def __init__(self, site: SiteConfig) -> None:
        self._limits = stall_limits(site)
        self.acted_at: Callable[[], float] = lambda: 0.0
        """Returns the time of the latest action; replaced once there is an executor."""
        self.begin("starting", kind="disk")

    def begin(self, doing: str, *, kind: Phase = "") -> None:
        """Begin a phase, named by a verb in -ing."""
        self._latest = (doing, time.perf_counter(), self._limits[kind])

    def last_activity(self) -> Activity:
        """The latest progress of this process."""
        doing, began, limit = self._latest
        return Activity(doing, max(began, self.acted_at()), limit)


@contextmanager
def watching(
    last_activity: Callable[[], Activity], *, on_stall: Callable[[str], None] | None
) -> Iterator[None]:
    """Watch the block; on a stall print every thread's stack to standard error and call `on_stall`.

    Args:
        last_activity: returns the latest activity.
        on_stall: called with a message in the watching thread; None: do not watch.
    """
    if on_stall is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        activity = last_activity()
        while not over.wait(min(activity.limit / 4, 5.0)):
            activity = last_activity()
            if (silent := time.perf_counter() - activity.at) > activity.limit:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                on_stall(
                    f"nothing new was begun for {silent:.0f} s while {activity.doing}; "
                    "the stacks of all threads are in the log"
                )
                return

    thread = threading.Thread(target=watch, daemon=True, name="watchdog")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
