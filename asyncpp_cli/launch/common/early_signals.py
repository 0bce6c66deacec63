"""Signals received by a job's process before it is ready to handle them.

Imports next to nothing, since it must run before all other imports. Until handlers are installed a signal
kills the process; `job_end` does not count that as a failure of the run. The job script traps signals while
it loads the site's modules, ignores them while Python starts, and passes on what it trapped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNAL_VARIABLE = "ASYNCPP_TOLD_BY"
"""Name of the signal that the job script trapped; empty for none."""

received: list[signal.Signals] = []
"""Signals in the order in which they came."""


def listen(*numbers: signal.Signals) -> None:
    """Collect signals in `received` from now on, after any signal that the job script trapped."""
    for number in numbers:
        signal.signal(number, _receive)
    # Removed from the environment, so that child processes do not take it for theirs.
    if name := os.environ.pop(SIGNAL_VARIABLE, ""):
        received.insert(0, signal.Signals[name])


def _receive(number: int, _frame: FrameType | None) -> None:
    received.append(signal.Signals(number))


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGUSR2 in this process and the processes started in the block.

    SLURM signals every process of a job that is requeued, including the command that requests it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
