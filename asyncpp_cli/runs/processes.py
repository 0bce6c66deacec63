"""Identifying processes across files, and checking whether they still run.

Pids are reused, so the start time is compared as well. A pid is unique only on one machine since its boot and
in one PID namespace (containers have their own); processes elsewhere are never checked.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stages.config.records import Meta

_UNKNOWN = 0


@dataclass(frozen=True)
class ProcessId:
    """A process on some machine."""

    host: str
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """kill(2) takes a pid of 0 or less for many processes."""
    start: int
    """Start time in clock ticks since boot; 0 if unknown."""
    boot: str = ""
    """The machine's boot id; empty if unknown."""
    namespace: str = ""
    """Id of the PID namespace; empty if unknown."""


def user_name() -> str:
    """Name of the current user; `user UID` where there is no passwd entry (in a container)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def this_process() -> ProcessId:
    """The calling process."""
    return process_id(os.getpid())


def process_id(pid: int) -> ProcessId:
    """A process of this machine and PID namespace, by its pid."""
    host, boot, namespace = _here()
    return ProcessId(host, pid, _start(pid) or _UNKNOWN, boot, namespace)


def is_local(process: ProcessId) -> bool:
    """Whether a process belongs to this machine and PID namespace, so that it can be checked."""
    host, boot, namespace = _here()
    return (
        process.host == host
        and _may_equal(process.boot, boot)
        and _may_equal(process.namespace, namespace)
        and not _shows_others()
    )


def is_gone(process: ProcessId) -> bool:
    """Whether a local process has ended; False for processes of other machines."""
    if not is_local(process):
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # exists, but belongs to another user
    start = _start(process.pid)
    return start is None or start not in (process.start, _UNKNOWN)


def seconds_since(monotonic: float, at: ProcessId) -> float | None:
    """Seconds since a process read this from the monotonic clock of its machine; None on another machine, or
    after a restart of it."""
    _, boot, _ = _here()
    return max(0.0, time.monotonic() - monotonic) if boot and boot == at.boot else None


def send_signal(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to a local process, if it still runs."""
    if is_local(process) and not is_gone(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def _here() -> tuple[str, str, str]:
    """Host, boot and PID namespace of the calling process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (it is no path)
    except (OSError, UnicodeDecodeError):
        boot = namespace = ""
    return socket.gethostname(), boot, namespace


def _shows_others() -> bool:
    """Whether /proc is another PID namespace's, as after `unshare --pid`; its pids are not these."""
    try:
        return os.readlink("/proc/self") != str(os.getpid())  # noqa: PTH115 (it is no path)
    except OSError:
        return False


def _may_equal(first: str, second: str) -> bool:
    return not first or not second or first == second


def _start(pid: int) -> int | None:
    """Start time of a process; `_UNKNOWN` without /proc; None if it has ended."""
    if not Path("/proc/self/stat").exists() or _shows_others():
        return _UNKNOWN
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # From the process state on: the command name, in parentheses, may contain parentheses and blanks.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
