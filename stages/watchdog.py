"""Notices that a process has come to a standstill, and says where all its threads are."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Sign(NamedTuple):
    """The latest sign of life of a process."""

    doing: str
    """What it was about to do, as a verb in -ing."""
    at: float
    """Clock (`time.perf_counter`), seconds."""
    limit: float
    """Seconds without another one that are a standstill."""


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
