"""Is a process that a file names still there? Pids are used again, so its start time is compared too."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_UNKNOWN = 0


@dataclass(frozen=True)
class ProcessId:
    """A process on some machine."""

    host: str
    pid: int
    start: int
    """When it started, in the kernel's ticks since boot; 0 where the system does not say."""


def this_process() -> ProcessId:
    """The calling process."""
    return process_id(os.getpid())


def process_id(pid: int) -> ProcessId:
    """A process of this machine."""
    return ProcessId(host=socket.gethostname(), pid=pid, start=_start(pid) or _UNKNOWN)


def is_here(process: ProcessId) -> bool:
    """Whether it is a process of this machine, so that it can be looked for."""
    return process.host == socket.gethostname()


def is_gone(process: ProcessId) -> bool:
    """Whether a process of this machine has ended (one of another machine is never known to have)."""
    if not is_here(process):
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # somebody else's: there is one
    start = _start(process.pid)
    return start is None or start not in (process.start, _UNKNOWN)


def end(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to a process of this machine, if it is still the same one."""
    if is_here(process) and not is_gone(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def _start(pid: int) -> int | None:
    """Start time of a process; `_UNKNOWN` where there is no /proc; None if it has ended."""
    if not Path("/proc/self/stat").exists():
        return _UNKNOWN
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name stands in parentheses and may hold anything, parentheses and blanks too.
    fields = stat.rpartition(")")[2].split()
    state, start = fields[0], int(fields[19])
    return None if state == "Z" else start
