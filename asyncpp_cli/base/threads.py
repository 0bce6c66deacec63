"""Checks that threads can be started before a library that panics without them is used."""

from __future__ import annotations

import importlib
import os
import threading
import warnings

_POOLS_OF_POLARS = 3
"""Thread pools of polars; each has a thread per core."""

_BESIDE_POOLS = 10
"""Other threads: of polars, of its allocator, and for reading files in a report."""


def need_polars() -> None:
    """Check that polars can start its threads; if it cannot, it panics with a `BaseException`.

    Raises:
        RuntimeError: "can't start new thread", as raised by Python.
        ImportError: its library cannot be loaded.
    """
    limit = os.environ.get("POLARS_MAX_THREADS", "")
    pool_size = int(limit) if limit.isascii() and limit.isdigit() else len(os.sched_getaffinity(0))
    need_threads(_POOLS_OF_POLARS * pool_size + _BESIDE_POOLS)
    with warnings.catch_warnings():
        # It only warns, and fails later, where memory is too small for its library.
        warnings.filterwarnings("error", "Polars binary is missing")
        try:
            importlib.import_module("polars")
        except UserWarning as error:
            raise ImportError(str(error)) from error


def need_threads(number: int) -> None:
    """Check that this number of threads can run at once.

    Raises:
        RuntimeError: "can't start new thread", as raised by Python.
    """
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(number)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    finally:
        done.set()
        for thread in started:
            thread.join()
