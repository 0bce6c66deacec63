"""Threads that a library will start: looked for beforehand, where the library panics for want of them."""

from __future__ import annotations

import os
import threading

_POOLS_OF_POLARS = 3
"""Each has a thread a core: for columns, for files, for what waits."""

_BESIDE_POOLS = 10
"""Of polars, of its allocator, and those that read files for a report."""


def need_polars() -> None:
    """Make sure that polars can start its threads.

    Without them its Rust prints a backtrace and ends the command by an exception that is no `Exception`.

    Raises:
        RuntimeError: "can't start new thread", as of Python.
    """
    cores = os.environ.get("POLARS_MAX_THREADS", "")
    each = int(cores) if cores.isascii() and cores.isdigit() else len(os.sched_getaffinity(0))
    need_threads(_POOLS_OF_POLARS * each + _BESIDE_POOLS)


def need_threads(number: int) -> None:
    """Start so many threads at once, and let them end.

    Raises:
        RuntimeError: "can't start new thread", as of Python.
    """
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(number)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    finally:
        over.set()
        for thread in started:
            thread.join()
