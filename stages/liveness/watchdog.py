"""Detects that a process makes no progress, and prints the stacks of its threads.

One rule of when a run counts as stalled, for its own processes and for those that watch it from outside.
NCCL's flight recorder keeps the latest operations of every communicator; a stalled process writes them.
Imports torch only to write.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from stages.config.run_config import SiteConfig

Phase = Literal["", "disk", "start"]

_TIMEOUTS = 2.0
"""Timeouts without progress after which a process counts as stalled."""


def stall_limits(site: SiteConfig) -> Mapping[Phase, float]:
    """Seconds without progress after which a process counts as stalled, by phase: it exchanges messages,
    reads or writes a checkpoint or text, or does what comes before its first message (it builds its stage,
    which may run the user's own code, compiles it, and waits for the slowest process)."""
    return {
        "": _TIMEOUTS * site.timeout,
        "disk": _TIMEOUTS * max(site.timeout, site.save_timeout),
        "start": _TIMEOUTS * max(site.timeout, site.start_timeout),
    }


def longest_silence(site: SiteConfig) -> float:
    """Seconds without a heartbeat after which a run counts as stalled, whatever phase it is in."""
    return max(stall_limits(site).values())


class Waiting(NamedTuple):
    """A message that a rank waits for."""

    text: str
    """What it waits for, as a verb phrase."""
    peer: int
    """The rank that it waits for: a process of the run, counted over all pipelines."""


def awaited_rank(waits_for: Mapping[int, int]) -> int | None:
    """The one rank at the end of all chains of waiting; None if there is none, or several.

    Args:
        waits_for: by rank, the rank that it waits for.
    """
    ends = set()
    for rank in waits_for:
        passed = {rank}
        while (rank := waits_for.get(rank, rank)) not in passed:
            passed.add(rank)
        if rank in waits_for:
            return None  # they wait for each other
        ends.add(rank)
    return ends.pop() if len(ends) == 1 else None


class Activity(NamedTuple):
    """The latest progress of a process."""

    doing: str
    """The phase it is in, as a verb in -ing."""
    at: float
    """Time of the latest progress (`time.perf_counter`), seconds."""
    limit: float
    """Seconds without progress after which it counts as stalled."""
    waiting: Waiting | None = None
    """The message that it waits for, if any."""


class ActivityTracker:
    """The progress of a process: its phase, and when it last did something."""

    def __init__(self, site: SiteConfig) -> None:
        self._limits = stall_limits(site)
        self.acted_at: Callable[[], float] = lambda: 0.0
        """Returns the time of the latest action; replaced once there is an executor."""
        self.waiting: Callable[[], Waiting | None] = lambda: None
        """Returns what the process waits for; replaced once there are links."""
        self.begin("starting", kind="disk")

    def begin(self, doing: str, *, kind: Phase = "") -> None:
        """Begin a phase, named by a verb in -ing."""
        self._latest = (doing, time.perf_counter(), self._limits[kind])

    def last_activity(self) -> Activity:
        """The latest progress of this process."""
        doing, began, limit = self._latest
        return Activity(doing, max(began, self.acted_at()), limit, self.waiting())


@contextmanager
def watching(
    last_activity: Callable[[], Activity],
    *,
    on_stall: Callable[[str], None] | None,
    on_wait: Callable[[Waiting | None], None] = lambda waiting: None,
) -> Iterator[None]:
    """Watch the block; on a stall print every thread's stack to standard error and call `on_stall`.

    Args:
        last_activity: returns the latest activity.
        on_stall: called with a message in the watching thread; None: do not watch.
        on_wait: called there with what the process has waited for during a quarter of its limit, and with
            None once it goes on.
    """
    if on_stall is None:
        yield
        return
    over = threading.Event()
    announced: Waiting | None = None

    def watch() -> None:
        nonlocal announced
        activity = last_activity()
        # A communicator gives up after half of the limit: what it waits for is announced before.
        while not over.wait(min(activity.limit / 8, 5.0)):
            activity = last_activity()
            silent = time.perf_counter() - activity.at
            waiting = activity.waiting if silent > activity.limit / 4 else None
            if waiting != announced:
                announced = waiting
                on_wait(waiting)
            if silent > activity.limit:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                on_stall(
                    f"nothing new was begun for {silent:.0f} s while {activity.doing}; "
                    + ("" if waiting is None else f"it {waiting.text}; ")
                    + "the stacks of all threads are in the log"
                )
                return

    thread = threading.Thread(target=watch, daemon=True, name="watchdog")
    thread.start()
    try:
        yield
        if announced is not None:
            on_wait(None)
    finally:
        over.set()
        thread.join()


_DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORDER_SETTINGS = {
    # Operations kept per process; several steps of a pipeline.
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "20000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
}
"""Values of environment variables by their names, the present one and then older ones."""


def set_flight_recorder(environment: MutableMapping[str, str], *, folder: Path) -> None:
    """Switch NCCL's flight recorder on, with dumps as `folder/nccl-RANK`; variables that are set are kept.
    Called before torch is imported."""
    for names, value in {**_RECORDER_SETTINGS, _DUMP_FILE: str(folder.resolve() / "nccl-")}.items():
        if not any(name in environment for name in names):
            environment[names[0]] = value


def write_operations(file: Path) -> bool:
    """Write the recorded operations as JSON; returns whether there are any. The process's watchdog ends a run
    before NCCL's timeout would write them."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return False
    with contextlib.suppress(OSError, RuntimeError):
        file.write_bytes(dump(includeCollectives=True, onlyActive=False))
        return True
    return False
