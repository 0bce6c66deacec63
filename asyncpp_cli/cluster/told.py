"""Signals to end that came to this process of a job. Imports next to nothing, for it listens before all else.

Until a process listens a signal ends it. In a job that is no failure of the run: see `job_end`. The script of
a job ignores signals in that moment, and hands over what came before, while it loaded the site's modules.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TOLD_VARIABLE = "ASYNCPP_TOLD_BY"
"""Name of the signal that the script of a job got before it became this process; empty for none."""

told: list[signal.Signals] = []
"""In the order in which they came."""


def _tell(number: int, _frame: FrameType | None) -> None:
    told.append(signal.Signals(number))


def listen(*numbers: signal.Signals) -> None:
    """Keep the signals that come from now on in `told`, behind what the script of the job has handed over."""
    for number in numbers:
        signal.signal(number, _tell)
    # Out of the environment, for the processes that this one starts begin anew.
    if name := os.environ.pop(TOLD_VARIABLE, ""):
        told.insert(0, signal.Signals[name])


@contextmanager
def undisturbed() -> Iterator[None]:
    """In the block, signals to end wait, for this process and for those that it starts.

    SLURM sends them to every process of a job that it queues again: to the command that asked for it, too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
