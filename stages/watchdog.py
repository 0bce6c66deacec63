"""Notices that a process has come to a standstill, and says where all its threads are."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple


class Sign(NamedTuple):
    """The latest sign of life of a process."""

    doing: str
    """What it was about to do, as a verb in -ing."""
    at: float
    """Clock (`time.perf_counter`), seconds."""
    limit: float
    """Seconds without another one that are a standstill."""


STALL = 2.0
"""Timeouts without a sign of life that are a standstill."""

_BUILDING = 5.0
"""As many times as long may it take to build the model: code of the user's own is imported and run then."""


class Doing:
    """What a process is about, from its start on: its signs of life.

    Args:
        timeout: seconds that a message may take.
        save_timeout: seconds that reading or writing a checkpoint, or text, may take.
        start_timeout: seconds that the slowest process may take to start.
    """

    def __init__(self, *, timeout: float, save_timeout: float, start_timeout: float) -> None:
        self._limits = {
            "": STALL * timeout,
            "building": STALL * timeout * _BUILDING,
            "disk": STALL * max(timeout, save_timeout),
            "start": STALL * max(timeout, start_timeout),
        }
        self.acted_at: Callable[[], float] = lambda: 0.0
        """When anything was done last; replaced by who knows more."""
        self.begin("starting", kind="disk")

    def begin(self, doing: str, *, kind: Literal["", "building", "disk", "start"] = "") -> None:
        """Say what is begun, as a verb in -ing."""
        self._latest = (doing, time.perf_counter(), self._limits[kind])

    def last_sign(self) -> Sign:
        """What this process began last."""
        doing, began, limit = self._latest
        return Sign(doing, max(began, self.acted_at()), limit)


@contextmanager
def watching(last_sign: Callable[[], Sign], *, on_stall: Callable[[str], None] | None) -> Iterator[None]:
    """Watch the block; after a standstill print every thread's stack to standard error and call `on_stall`.

    Args:
        last_sign: the latest sign of life.
        on_stall: told what happened, in the watching thread; None: nobody watches.
    """
    if on_stall is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        sign = last_sign()
        while not over.wait(min(sign.limit / 4, 5.0)):
            sign = last_sign()
            if (silent := time.perf_counter() - sign.at) > sign.limit:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                on_stall(
                    f"nothing new was begun for {silent:.0f} s while {sign.doing}; "
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
