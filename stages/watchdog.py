"""Notices that a process has come to a standstill, and says where all its threads are."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watching(
    last_sign: Callable[[], float | None], *, limit: float, on_stall: Callable[[str], None] | None
) -> Iterator[None]:
    """Watch the block; after a standstill print every thread's stack to standard error and call `on_stall`.

    Args:
        last_sign: clock (`time.perf_counter`) of the latest sign of life, seconds; None: nothing is expected.
        limit: seconds without one that are a standstill.
        on_stall: told what happened, in the watching thread; None: nobody watches.
    """
    if on_stall is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(min(limit / 4, 5.0)):
            sign = last_sign()
            if sign is not None and (silent := time.perf_counter() - sign) > limit:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                on_stall(
                    f"nothing new was begun for {silent:.0f} s; the stacks of all threads are in the log"
                )
                return

    thread = threading.Thread(target=watch, daemon=True, name="watchdog")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
