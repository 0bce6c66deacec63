"""Being told to end: SIGTERM, or the SIGUSR2 that clusters send some time before they end a job.

No handler can save a run from within; it sets a flag, and the ranks agree on the step after which they end.
Imports no torch, so that a process listens before it has loaded it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

RESUMABLE = 75
"""Exit code of a process that was told to end and has saved what it did (EX_TEMPFAIL: try again later)."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


def never() -> bool:
    """Nobody tells this process to end."""
    return False


@contextmanager
def listening(*, patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Listen for the signals in this block; gives what says whether one has come.

    Args:
        patient: only the first signal counts. Otherwise another SIGTERM after it ends the process at once.
            A cluster sends its signal to every process of a job, and the supervisor of this one sends its own
            as well: where there is one, it decides how long the process may take.
    """
    told = False

    def tell(number: int, _frame: FrameType | None) -> None:
        nonlocal told
        if told and number == signal.SIGTERM and not patient:
            raise SystemExit(128 + number)
        told = True

    before = {number: signal.signal(number, tell) for number in SIGNALS}
    try:
        yield lambda: told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
