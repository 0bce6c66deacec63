"""Requests to stop: SIGTERM, or the SIGUSR2 that clusters send some time before they end a job.

The handler sets a flag, and the ranks agree on the step after which they stop. Imports no torch, so that a
process can handle signals before it has loaded it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

RESUMABLE = 75
"""Exit code of a process that was asked to stop and has saved (EX_TEMPFAIL: try again later)."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


def never() -> bool:
    """A stop condition that never holds."""
    return False


@contextmanager
def listening(*, patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Handle the signals in this block; yields a function that returns whether one has arrived.

    Args:
        patient: ignore further signals. Otherwise a SIGTERM after the first signal ends the process at once.
            A supervised process is patient: cluster and supervisor both signal it, and the supervisor decides
            how long it may take.
    """
    stop_requested = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal stop_requested
        if stop_requested and number == signal.SIGTERM and not patient:
            raise SystemExit(128 + number)
        stop_requested = True

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
